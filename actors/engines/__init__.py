"""Policy engines: what samples tokens for an actor. One file per engine."""
