"""The step as data: traced once into a small graph, split at the loop, and differentiated."""
