"""Training: options, folder, processes, loop."""
