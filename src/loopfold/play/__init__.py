"""A page on which a network learns while you watch, for teachers; it needs no run."""
