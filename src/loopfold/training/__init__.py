"""Training: options, folder, checkpoint, watching, loop."""
