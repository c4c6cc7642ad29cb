"""A web shop in text, as WebShop has it: a generated catalogue and shopping goals."""
