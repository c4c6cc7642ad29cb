"""Engines for the tests of this directory; see `tests/learner/engines.py`."""

from tests.learner.engines import start

__all__ = ["start"]
