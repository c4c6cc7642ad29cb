"""The broker's store goes back by some steps, and every role lives on: the run goes on, and tickets are conserved."""

import asyncio
import copy
from pathlib import Path
from typing import Any

import pytest

from horizonrl.broker.api import Key, Stream
from horizonrl.broker.memory import MemoryRun
from horizonrl.broker.state import StateStore
from horizonrl.broker.tickets import TicketQueue
from horizonrl.common.errors import LogGap, RunFailed, StateConflict
from horizonrl.common.state import Progress
from horizonrl.common.types import Kind
from tests.learner.test_power_cut import check_ends, replay_of
from tests.learner.world import EVALUATING, InlineExecutor, MortalTransport, World

STEPS = 40


class GatedTransport(MortalTransport):
    """A transport that leases nothing while its gate is closed."""

    gate: asyncio.Event

    async def lease(self, *arguments: Any, **named: Any) -> Any:
        await self.gate.wait()
        return await super().lease(*arguments, **named)


class LivingWorld(World):
    """A world whose transports are known, so that all of them lose and regain their broker at once."""

    transports: list[MortalTransport]
    gate: asyncio.Event
    """Open while the actor plays."""

    async def _relive(self, role: str, program: Any) -> None:
        transport = GatedTransport(self.server, None)
        transport.gate = self.gate
        self.transports.append(transport)
        await program(transport)

    async def run(self) -> None:
        """Let the run come to its end; the learner alone ends when its broker goes back, and is started again."""
        asyncio.get_running_loop().set_default_executor(InlineExecutor())
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            actor = group.create_task(self._relive("actor", self._act))
            controller = group.create_task(self._relive("controller", self._control))
            await self._learn_on()
            await controller
            actor.cancel()

    async def _learn_on(self) -> None:
        while True:
            try:
                return await self._relive("learner", self.learn)
            except* (LogGap, StateConflict):
                self.lives["learner"] += 1


def saved(run: MemoryRun) -> dict[str, Any]:
    return copy.deepcopy(
        {
            name: getattr(run, name)
            for name in ("streams", "leases", "delivered", "state", "revision")
        }
    )


def restore(run: MemoryRun, backup: dict[str, Any]) -> None:
    """Put back what was saved, into the streams that readers hold."""
    for stream in Stream:
        vars(run.streams[stream]).update(vars(copy.deepcopy(backup["streams"][stream])))
    run.leases.clear()
    run.leases.update(backup["leases"])
    run.delivered, run.revision = backup["delivered"], backup["revision"]
    run.state = dict(backup["state"])


async def lose_steps(world: LivingWorld, after: int, lost: int) -> None:
    """Let the broker forget the `lost` steps that follow `after`."""
    state = StateStore(MortalTransport(world.server, None))

    async def step(wanted: int) -> None:
        while (
            not isinstance(progress := await state.get(Key.PROGRESS), Progress)
            or progress.step < wanted
        ):
            await asyncio.sleep(0)

    run = world.server.runs["run"]
    await step(after)
    backup = saved(run)
    await step(after + lost)
    world.gate.clear()
    # All that has credit is issued: a ticket that is still due would show what was lost.
    await asyncio.sleep(0.3)
    restore(run, backup)
    world.gate.set()
    for transport in world.transports:
        transport.counters.reconnects += 1
    await world.server.notify()


@pytest.mark.parametrize(("lost", "overrides"), [(5, ()), (20, ()), (8, EVALUATING)])
async def test_a_run_goes_on_though_its_broker_has_lost_every_ticket_that_is_outstanding(
    tmp_path: Path, lost: int, overrides: tuple[str, ...]
) -> None:
    world = LivingWorld(tmp_path, overrides=(f"--rl.steps={STEPS - 2}", *overrides))
    world.transports, world.gate = [], asyncio.Event()
    world.gate.set()
    world._too_early = lambda *_: False  # type: ignore[method-assign]  # a lost ticket is found after older ones
    losing = asyncio.create_task(lose_steps(world, after=6, lost=lost))
    await world.run()
    await losing
    check_ends(world)
    assert world.lives["learner"] == 1
    # A program that begins counts as many as have ended, from the stream alone.
    ends = [ticket for line in world.ledger() for _, ticket in line["trained"]]
    # The lost ones were issued a second time.
    counters = ("tickets_issued_total", "tickets_reissued_total")
    stored = sum(world.metrics.value(name, kind="train") for name in counters)
    assert stored > sum("train" in end for end in ends)
    assert await TicketQueue(world.transports[0]).count_issued(Kind.TRAIN) >= sum(
        "train" in end for end in ends
    )


async def test_a_replay_says_that_the_broker_has_lost_an_entry_since_and_skips_what_the_run_had_not_seen(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    await world.run()
    lines = world.ledger()
    sequence, _ = lines[3]["trained"][0]
    stream = world.server.runs["run"].streams[Stream.GROUPS]
    lost = stream.messages[sequence]
    stream.remove(sequence)
    with pytest.raises(RunFailed, match=f"does not hold entries {sequence} to {sequence} .*--to 3"):
        assert [done async for done in replay_of(world).steps(None, lines)]
    # The run itself has met the hole, and the log is whole again.
    again = World(tmp_path / "again", server=world.server)
    world.server.runs["run"].state.clear()
    await again.run()
    holed = again.ledger()
    assert [line["holes"] for line in holed if "holes" in line] == [[[sequence, sequence]]]
    stream.messages = dict(sorted({**stream.messages, sequence: lost}.items()))
    assert all([done.equal async for done in replay_of(again).steps(None, holed)])
