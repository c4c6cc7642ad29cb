"""`horizonrl history`: version control for runs, from their ledgers, logs and weights."""
