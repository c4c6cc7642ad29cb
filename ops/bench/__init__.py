"""Measurements: each prints what it measured next to what a user would pick instead."""
