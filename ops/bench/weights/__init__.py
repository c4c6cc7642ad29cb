"""The bench of weights as changes: their size and speed against what others send."""
