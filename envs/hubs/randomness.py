"""Random numbers of an episode's own, for hubs that draw from Python's and numpy's global generators."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256

import numpy as np


class OwnRandom:
    """The global generators as one episode sees them: seeded by a name, untouched by all other episodes.

    The body of `drawn` must not wait, and runs in the environments' thread (envs/in_thread.py), so that no two
    episodes have the generators at once.
    """

    def __init__(self, name: str) -> None:
        seed = int.from_bytes(sha256(name.encode()).digest()[:4])
        self._python = random.Random(seed).getstate()
        self._numpy = np.random.RandomState(seed).get_state()

    @contextmanager
    def random_for(self) -> Iterator[None]:
        """Let the body draw from this episode's generators, then put back those that were there before."""
        python, numpy = random.getstate(), np.random.get_state()
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        try:
            yield
        finally:
            self._python, self._numpy = random.getstate(), np.random.get_state()
            random.setstate(python)
            np.random.set_state(numpy)
