"""How late an event loop is, which is what a blocking call costs everything else on it; and how calls share a loop."""

import asyncio
import time
from collections import deque
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

TICK_S = 0.005
PASS_S = 0.004
"""A pass of the loop that has lasted this long begins no further call: with one of 4 ms, a tick is 8 ms late."""


class LoopLag:
    """Checks the running loop every 5 ms; `worst_s` is the longest delay of a tick since the last `take`."""

    def __init__(self) -> None:
        self.worst_s = 0.0

    async def watch(self) -> None:
        """Measure until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + TICK_S
            await asyncio.sleep(TICK_S)
            # The longest delay and not the mean: a single blocking call holds up everything else on the loop.
            self.worst_s = max(self.worst_s, loop.time() - due)

    def take(self) -> float:
        """Return the longest delay since the last call."""
        worst, self.worst_s = self.worst_s, 0.0
        return worst


async def turn() -> None:
    """Wait until the loop may spend a few milliseconds on a call that does not wait, such as an environment's step.

    A pass of an event loop runs everything that is ready. When the replies to 32 episodes arrive together, their 32
    steps would be one pass, and everything else on the loop would wait for all of them. A call that comes PASS_S after
    the first one of its pass waits in line, of which every pass lets one go: each is woken once, however long the line.
    """
    loop = asyncio.get_running_loop()
    current = _PASSES.get(loop)
    if current is None:
        # Not the loop's time: uvloop's stands still within a pass.
        _PASSES[loop] = _Pass(time.monotonic())
        loop.call_soon(_begin_pass, loop)
    elif current.waiting or time.monotonic() - current.began_at >= PASS_S:
        current.waiting.append(loop.create_future())
        await current.waiting[-1]


@dataclass(slots=True)
class _Pass:
    began_at: float
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)


# Weak, since loops end before the process does.
_PASSES: MutableMapping[asyncio.AbstractEventLoop, _Pass] = WeakKeyDictionary()


def _begin_pass(loop: asyncio.AbstractEventLoop) -> None:
    waiting = _PASSES[loop].waiting
    while waiting and waiting[0].done():  # who waited was cancelled
        waiting.popleft()
    if not waiting:
        del _PASSES[loop]
        return
    waiting.popleft().set_result(None)
    loop.call_soon(_begin_pass, loop)  # behind the call that goes now, whose time is then spent
