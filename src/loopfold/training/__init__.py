"""Training a language model, from options to a run on disk."""
