"""The task templates, by the sites that they are about. `table.py` lists them by category."""
