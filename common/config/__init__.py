"""The configuration of a run: its schema, the schedule arithmetic on it, and how it is loaded."""
