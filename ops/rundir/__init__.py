"""Read a run: its directory, its troubles, whether it is over."""
