"""Pictures: the circuit and the unfolded graph of a network, heat maps and curves."""
