"""How calls that do not wait share an event loop."""

import asyncio
import time
from itertools import pairwise
from types import SimpleNamespace

import pytest
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


def test_a_long_line_wakes_each_call_once_and_in_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, gone = 0, list[int]()

    def clock() -> float:
        nonlocal looks
        looks += 1
        return float(looks)  # each look finds that the pass has lasted too long

    monkeypatch.setattr(lag, "time", SimpleNamespace(monotonic=clock))

    async def call(number: int) -> None:
        await lag.turn()
        gone.append(number)

    async def scenario() -> None:
        line = [asyncio.create_task(call(number)) for number in range(1000)]
        await asyncio.sleep(0)
        for number in range(100, 200):
            line[number].cancel()
        await asyncio.gather(*line, return_exceptions=True)
        await call(1000)  # the line is forgotten with its last call

    asyncio.run(scenario())
    assert gone == [*range(100), *range(200, 1001)]
    assert looks <= 1001


async def test_a_call_alone_does_not_wait() -> None:
    with_nobody = lag.turn()
    try:
        with_nobody.send(None)  # a coroutine that does not wait ends at once
    except StopIteration:
        return
    raise AssertionError("it waited")
