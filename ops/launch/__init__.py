"""Start a run's parts on one machine and keep them running."""
