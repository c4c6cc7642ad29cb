"""Proof by killing: chaos, soak and fuzz runs, and the verdict on what they leave behind."""
