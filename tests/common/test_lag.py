"""How calls that do not wait share an event loop."""

import asyncio
import time
from itertools import pairwise

import uvloop

from horizonrl.common import lag

CALLS = 32


def test_calls_that_come_together_leave_the_loop_to_others_in_between() -> None:
    before_each_pass = list[int]()
    done = 0

    async def call() -> None:
        nonlocal done
        await lag.turn()
        time.sleep(lag.PASS_S / 2)  # noqa: ASYNC251 - as a step does that computes
        done += 1

    def look(loop: asyncio.AbstractEventLoop) -> None:
        before_each_pass.append(done)
        if done < CALLS:
            loop.call_soon(look, loop)

    async def scenario() -> None:
        look(asyncio.get_running_loop())
        await asyncio.gather(*(call() for _ in range(CALLS)))

    for run in (asyncio.run, uvloop.run):
        done = 0
        before_each_pass.clear()
        run(scenario())
        assert done == CALLS
        # Two fill a pass; the loop may look at its other work between the end of one and the begin of the next.
        assert max(later - earlier for earlier, later in pairwise(before_each_pass)) <= 4


def test_a_call_alone_does_not_wait() -> None:
    async def scenario() -> None:
        with_nobody = lag.turn()
        try:
            with_nobody.send(None)  # a coroutine that does not wait ends at once
        except StopIteration:
            return
        raise AssertionError("it waited")

    asyncio.run(scenario())
