"""Pages that are generated from tables in the code."""
