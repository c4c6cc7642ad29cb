"""Web navigation over a small generated web: a shop, its admin, a map, a forum and a code host, without a browser."""
