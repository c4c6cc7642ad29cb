"""MCP servers as environments: a file has the tasks, a function grades."""
