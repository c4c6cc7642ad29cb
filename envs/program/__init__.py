"""Any program as an environment: it plays one task against the gateway, in a process of its own."""
