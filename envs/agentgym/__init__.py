"""AgentGym's servers as environments: its wire, its rules and its task numbers."""
