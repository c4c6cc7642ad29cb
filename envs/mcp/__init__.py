"""MCP servers as environments: their tools are the agent's, a file has the tasks, a function grades."""
