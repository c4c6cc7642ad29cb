"""Messages and tool calls as a model's chat template writes them, token for token."""
