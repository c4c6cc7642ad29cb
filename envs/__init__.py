"""The environment protocol, its registry and conformance check, action formats, and the small environments."""
