"""How weights travel: whole frames, and the changes between two versions."""
