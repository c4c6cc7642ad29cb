"""Any program as an environment, in a process of its own."""
