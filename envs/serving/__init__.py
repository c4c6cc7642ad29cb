"""Environments as an HTTP and WebSocket server, in AgentGym's and OpenEnv's dialects."""
