"""What a person sees of a run while it lives: console, status, trackers."""
