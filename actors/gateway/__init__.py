"""The gateway: the policy as an OpenAI-compatible endpoint for the programs of running episodes."""
