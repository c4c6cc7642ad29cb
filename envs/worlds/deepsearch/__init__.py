"""Deep search: questions over a generated library with a real search index."""
