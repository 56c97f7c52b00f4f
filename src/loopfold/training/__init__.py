"""Training: options, folder, checkpoint, run, watching, guards, job, loop, rehearsal."""
