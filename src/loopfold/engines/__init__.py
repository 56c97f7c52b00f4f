"""Engines: the ways to run a recurrence. An engine changes time and memory, never the value."""
