"""What an engine trains with: one file per backend, named in `learner/engine/registry.py`."""
