"""How late an event loop is: what a blocking call costs everything else that runs on it."""

import asyncio

TICK_S = 0.005


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
