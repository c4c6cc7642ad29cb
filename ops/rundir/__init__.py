"""Read a run's directory."""
