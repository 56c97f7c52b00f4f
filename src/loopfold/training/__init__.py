"""Training: options, folder, watching, loop."""
