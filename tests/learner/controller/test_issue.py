"""Tickets that are issued together: each number once, without gaps, wherever the controller dies."""

import asyncio
from collections import Counter

import pytest

from horizonrl.broker.api import Key
from horizonrl.broker.memory import MemoryServer, MemoryTransport
from horizonrl.broker.state import StateStore
from horizonrl.broker.tickets import ISSUED_AT_ONCE, TicketQueue
from horizonrl.common.config.schema import RunConfig
from horizonrl.common.types import Kind
from horizonrl.learner.controller.main import build_controller
from tests.learner.controller.test_loop import SETTINGS, SOURCES, controller_on, issued_after, rl
from tests.learner.world import MortalTransport

GROUPS = 60
LARGE = RunConfig.load([], [*SETTINGS, f"--rl.groups_per_step={GROUPS}"])
CREDIT = 2 * GROUPS


@pytest.mark.parametrize("dies_at", [4, 9, 20, 41, 60, 99, 133, 150, 151, 200, 259])
async def test_a_controller_that_dies_among_tickets_issued_together_leaves_no_gap(
    dies_at: int,
) -> None:
    server = MemoryServer()
    await StateStore(MemoryTransport(server, "run")).put(Key.PROGRESS, rl(0, 0))
    mortal = MortalTransport(server, dies_at)
    mortal.program = asyncio.create_task(build_controller(LARGE, mortal, SOURCES).run())
    await asyncio.wait([mortal.program], timeout=1.0)
    assert mortal.program.done(), "the controller survived: choose a smaller number of requests"
    async with controller_on(server, LARGE) as (transport, _):
        assert await issued_after(transport, rl(0, 0), Kind.TRAIN) == CREDIT
        stored = Counter(
            ticket.number for _, ticket in await TicketQueue(transport).stored_tickets()
        )
        assert stored == Counter(range(CREDIT))


class Reordering(MemoryTransport):
    """A transport whose publishes overtake one another, and which dies when `left` of them are stored."""

    left = 0
    program: asyncio.Task[None] | None = None

    async def publish(self, *arguments, **named):  # type: ignore[no-untyped-def]
        if arguments[0].startswith("tickets."):
            number = int(named["message_id"].rpartition("-")[2])
            for _ in range((number * 7) % 11):
                await asyncio.sleep(0)
            if self.left == 0:
                assert self.program is not None
                self.program.cancel()
                await asyncio.Event().wait()
            self.left -= 1
        return await super().publish(*arguments, **named)


@pytest.mark.parametrize("left", [1, 5, 20, 63, 70, 100])
async def test_a_gap_that_a_dead_controller_left_is_filled_by_the_next_one(left: int) -> None:
    server = MemoryServer()
    await StateStore(MemoryTransport(server, "run")).put(Key.PROGRESS, rl(0, 0))
    transport = Reordering(server, "run")
    transport.left = left
    transport.program = asyncio.create_task(build_controller(LARGE, transport, SOURCES).run())
    await asyncio.wait([transport.program])
    before = [ticket.number for _, ticket in await TicketQueue(transport).stored_tickets()]
    assert len(before) == left
    assert max(before) - left < ISSUED_AT_ONCE
    async with controller_on(server, LARGE) as (other, _):
        assert await issued_after(other, rl(0, 0), Kind.TRAIN) == CREDIT
        after = sorted(ticket.number for _, ticket in await TicketQueue(other).stored_tickets())
        assert after == list(range(CREDIT))


async def test_two_controllers_at_once_issue_each_number_once() -> None:
    server = MemoryServer()
    async with (
        controller_on(server, LARGE) as (transport, _),
        controller_on(server, LARGE) as (other, _),
    ):
        for step in range(3):
            await issued_after(transport, rl(step, step * GROUPS), Kind.TRAIN)
        await asyncio.sleep(0.1)
        numbers = [ticket.number for _, ticket in await TicketQueue(other).stored_tickets()]
        assert len(numbers) == len(set(numbers))
        assert await TicketQueue(other).count_issued(Kind.TRAIN) == CREDIT + 2 * GROUPS


async def test_a_progress_that_calls_for_nothing_costs_the_controller_no_request() -> None:
    server = MemoryServer()
    await StateStore(MemoryTransport(server, "run")).put(Key.PROGRESS, rl(0, 0))
    transport = MortalTransport(server, None)
    transport.program = asyncio.create_task(build_controller(LARGE, transport, SOURCES).run())
    await issued_after(MemoryTransport(server, "run"), rl(0, 0), Kind.TRAIN)
    await asyncio.sleep(0.1)
    before = transport.requests
    for cursor in range(1, 6):
        progress = rl(0, 0).model_copy(update={"cursor": cursor})
        await StateStore(MemoryTransport(server, "run")).put(Key.PROGRESS, progress)
        await asyncio.sleep(0.02)
    assert transport.requests == before
    transport.program.cancel()
    await asyncio.wait([transport.program])
