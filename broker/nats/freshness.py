"""What a client of a cluster has already seen, so that no answer takes it back in time.

In a cluster the leader of a stream answers requests alone, without asking the other servers. A leader that was paused,
or cut off, does not know yet that another one has replaced it, and for a moment answers from an older state. Whoever
believed it would see its own writes undone: a learner would take itself for fenced, a reader would report a gap.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from horizonrl.common.logs import get_logger

log = get_logger()
T = TypeVar("T")

LAG_S = 30.0
"""How long an answer from an older state is not believed. A leader that was replaced learns of it within milliseconds
of hearing from the others, and an isolated one steps down after 10 s. After this time, the state has been lost."""
LAG_POLL_S = 0.1


class Freshness:
    """The highest sequence seen, by stream or key."""

    def __init__(self, clustered: bool) -> None:
        self.lag_s = LAG_S if clustered else 0.0
        """A single server has nobody to be behind: what it has lost is lost."""
        self._seen: dict[str, int] = {}

    def saw(self, name: str, sequence: int) -> None:
        self._seen[name] = max(self._seen.get(name, 0), sequence)

    async def at_least(
        self,
        name: str,
        look: Callable[[], Awaitable[T]],
        position: Callable[[T], int],
        wanted: int = 0,
    ) -> T:
        """Repeat `look` until its answer is as new as `wanted` and as what was seen; return the last one after `lag_s`.

        An answer that is still older then is the truth: the server has lost what came after it.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + self.lag_s
        wanted = max(wanted, self._seen.get(name, 0))
        while True:
            answer = await look()
            reached = position(answer)
            if reached >= wanted or loop.time() >= until:
                break
            log.warning("broker_behind", what=name, at=reached, seen=wanted)
            await asyncio.sleep(LAG_POLL_S)
        # Also downwards: once the loss is reported, later requests need not wait for it again.
        self._seen[name] = reached
        return answer
