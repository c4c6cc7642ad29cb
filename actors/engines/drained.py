"""The policy that swaps weights between generations, not within them (`actor.weights = "drained"`).

It wraps any engine's policy. The follower has fetched and verified a version before it calls `apply`, so that requests
wait only for the generations in progress and for the load. Meanwhile it holds this host's copy of the weights
(`actors/weights/host_copy.py`): another actor of the host can load the same version, and gets the next one after the
drain.
"""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from horizonrl.actors.policy import ChangedWords, Generation, Policy
from horizonrl.common.logs import get_logger
from horizonrl.common.types import PolicyVersion

log = get_logger()


class DrainedPolicy:
    """A Policy whose generations each have tokens of one version.

    New requests wait while it drains: otherwise busy actors would never get new weights. A generation that does not
    end is the engine's to cut, as without draining: the engine bounds the time of a request.
    """

    def __init__(self, policy: Policy) -> None:
        self.max_context_tokens = policy.max_context_tokens
        self.engine = policy.engine
        self.takes_words = policy.takes_words
        self._policy = policy
        self._running = 0
        self._waiting = 0
        self._idle, self._open = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self._open.set()
        self._applying = asyncio.Lock()

    @property
    def version(self) -> PolicyVersion:
        return self._policy.version

    async def generate(
        self,
        ids: Sequence[int],
        *,
        max_tokens: int,
        temperature: float,
        stop_ids: Sequence[int],
        seed: int | None,
    ) -> Generation:
        """Sample a continuation (see Policy), once no weights are being applied."""
        self._waiting += 1
        try:
            # Again, since the next version may have come before this request woke.
            while not self._open.is_set():
                await self._open.wait()
        finally:
            self._waiting -= 1
        self._running += 1
        self._idle.clear()
        try:
            return await self._policy.generate(
                ids, max_tokens=max_tokens, temperature=temperature, stop_ids=stop_ids, seed=seed
            )
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    async def apply(
        self, weights: Path, version: PolicyVersion, words: ChangedWords | None = None
    ) -> None:
        """Wait until the generations in progress have ended, and load the weights (see Policy)."""
        async with self._applying:
            started, running = time.monotonic(), self._running
            self._open.clear()
            try:
                await self._idle.wait()
                log.info(
                    "generations_drained",
                    version=str(version),
                    generations=running,
                    held=self._waiting,
                    drain_s=round(time.monotonic() - started, 3),
                )
                await self._policy.apply(weights, version, words)
            finally:
                # However it ended: a request that is held for ever would hold up the end of its actor.
                self._open.set()

    async def close(self) -> None:
        await self._policy.close()
