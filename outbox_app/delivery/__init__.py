"""Ways out: the drain and its publishers."""
