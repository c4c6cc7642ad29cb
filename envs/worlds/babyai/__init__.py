"""BabyAI: minigrid's levels with macro actions and an expert."""
