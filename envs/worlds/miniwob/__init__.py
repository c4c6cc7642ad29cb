"""MiniWoB++: the pages of the PyPI package `miniwob` in a real headless Chromium."""
