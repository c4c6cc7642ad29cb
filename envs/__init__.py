"""The environment protocol, its registry and conformance check, and what environments share."""
