"""`horizonrl plan`: what a run needs and where it will be slow, from formulas."""
