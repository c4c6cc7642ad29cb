"""Adapters for the tasks of other hubs: reasoning-gym, TextArena, TextWorld, Gymnasium, OpenEnv. One file per hub."""
