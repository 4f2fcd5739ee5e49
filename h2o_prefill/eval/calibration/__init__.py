"""Which layers need larger memory sets, or dense attention."""
