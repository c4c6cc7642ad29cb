"""SQL questions over generated databases, in a limited SQLite."""
