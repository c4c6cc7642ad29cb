"""`horizonrl eval`: any model on any environments, with intervals."""
