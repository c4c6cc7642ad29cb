"""The Python API: train, follow, read, evaluate and publish runs from a program or a notebook.

A thin layer on the commands. What they run in processes of their own, so does this: a notebook has an event loop
already, and an engine leaves threads behind. `horizonrl/__init__.py` says which names are public.
"""
