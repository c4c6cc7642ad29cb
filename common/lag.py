"""How late an event loop is, which is what a blocking call costs everything else on it; and how calls share a loop."""

import asyncio
import time
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
    the first one of its pass waits for another pass.
    """
    loop = asyncio.get_running_loop()
    while (current := _PASSES.get(loop)) and time.monotonic() - current.began_at >= PASS_S:
        await current.over.wait()
    if current is None:
        # Not the loop's time: uvloop's stands still within a pass.
        _PASSES[loop] = _Pass(time.monotonic())
        loop.call_soon(_end_pass, loop)  # at the beginning of the next one


@dataclass(slots=True)
class _Pass:
    began_at: float
    over: asyncio.Event = field(default_factory=asyncio.Event)


# Weak, since loops end before the process does.
_PASSES: MutableMapping[asyncio.AbstractEventLoop, _Pass] = WeakKeyDictionary()


def _end_pass(loop: asyncio.AbstractEventLoop) -> None:
    _PASSES.pop(loop).over.set()
