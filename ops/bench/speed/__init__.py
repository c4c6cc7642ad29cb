"""How fast the broker and the environments are."""
