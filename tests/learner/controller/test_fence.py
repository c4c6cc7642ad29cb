"""One controller issues a run's tickets: one that was paused while another took over issues nothing more."""

import asyncio
from typing import Any

import pytest

from horizonrl.broker.api import Key, Transport
from horizonrl.broker.memory import MemoryServer, MemoryTransport
from horizonrl.broker.state import StateStore
from horizonrl.broker.tickets import TicketQueue
from horizonrl.common.config.schema import RunConfig
from horizonrl.common.errors import Fenced
from horizonrl.common.service import _leaves
from horizonrl.common.types import Kind
from horizonrl.learner.controller.fence import ControllerFence
from horizonrl.learner.controller.main import build_controller
from tests.learner.controller.test_loop import (
    CONFIG,
    SETTINGS,
    SOURCES,
    controller_on,
    issued_after,
    rl,
)
from tests.learner.loop.test_fence import SlowTransport

FORMER = RunConfig.load([], [*SETTINGS, "--rollout.group_size=3"])


class PausedTransport(MemoryTransport):
    """Gives no news of a key while its process is stopped."""

    running: asyncio.Event

    async def watch(self, key: Key) -> Any:
        async for data in super().watch(key):
            await self.running.wait()
            yield data


async def ended(task: "asyncio.Task[None]") -> BaseException:
    """Return what ended a controller."""
    async with asyncio.timeout(5):
        await asyncio.wait([task])
    error = task.exception()
    assert isinstance(error, ExceptionGroup)
    (leaf,) = _leaves(error)
    return leaf


async def group_sizes(transport: Transport) -> list[int]:
    return [ticket.group_size for _, ticket in await TicketQueue(transport).stored_tickets()]


@pytest.mark.parametrize("ack_wait_s", [30.0, 0.05], ids=["it issues first", "it audits first"])
async def test_a_controller_that_wakes_with_a_former_recipe_issues_nothing_and_is_not_started_again(
    ack_wait_s: float,
) -> None:
    server = MemoryServer(ack_wait_s=ack_wait_s)
    zombie = PausedTransport(server, "run")
    zombie.running = asyncio.Event()
    await StateStore(zombie).put(Key.PROGRESS, rl(0, 0))
    old = asyncio.create_task(build_controller(FORMER, zombie, SOURCES).run())
    while await zombie.get(Key.RUN) is None:
        await asyncio.sleep(0)
    async with controller_on(server) as (transport, _):
        for step in range(1, 4):
            assert await issued_after(transport, rl(step, 2 * step), Kind.TRAIN) == 4 + 2 * step
        zombie.running.set()
        error = await ended(old)
        assert isinstance(error, Fenced) and error.exit_code == 2
        assert "another controller issues this run's tickets" in str(error)
        assert await issued_after(transport, rl(4, 8), Kind.TRAIN) == 12
        assert set(await group_sizes(transport)) == {CONFIG.rollout.group_size}


@pytest.mark.parametrize("loss", ["deleted", "gone back", "never there"])
async def test_a_controller_sets_its_recipe_again_if_the_broker_has_lost_it(loss: str) -> None:
    """Twice, and while it issues and audits at once: neither takes the other's word for a successor's."""

    server = MemoryServer()
    transport, state = SlowTransport(server, "run"), server.runs["run"].state
    await StateStore(transport).put(Key.RUN, FORMER.settings)
    backup = state[Key.RUN]
    fence = ControllerFence(transport, CONFIG.settings)
    await fence.take_over()
    for _ in range(2):
        if loss == "deleted":  # what `nats kv del` leaves under the key
            await transport.put(Key.RUN, b"")
        elif loss == "gone back":
            state[Key.RUN] = backup
        else:
            del state[Key.RUN]
        await asyncio.gather(fence.check(), fence.check())
        assert await StateStore(transport).get(Key.RUN) == CONFIG.settings
        await fence.check()


async def test_of_two_controllers_that_lost_the_key_together_one_goes_on() -> None:
    server = MemoryServer()
    fences = [
        ControllerFence(MemoryTransport(server, "run"), config.settings)
        for config in (FORMER, CONFIG)
    ]
    for fence in fences:
        await fence.take_over()
    await MemoryTransport(server, "run").put(Key.RUN, b"")
    outcomes = await asyncio.gather(*(fence.check() for fence in fences), return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {Fenced, type(None)}
