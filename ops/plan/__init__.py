"""`horizonrl plan`: what a run will need and where it will be slow, from formulas, before a machine is rented."""
