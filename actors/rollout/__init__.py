"""Play one episode: turns, context, programs, and what breaks it."""
