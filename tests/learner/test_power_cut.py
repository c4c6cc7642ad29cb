"""The broker loses power, and with it messages that it had acknowledged: what was trained stays so, the run goes on."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from horizonrl.broker.api import Stream
from horizonrl.broker.groups import Entry, GroupLog
from horizonrl.broker.log_continuity import resume_position
from horizonrl.broker.memory import MemoryServer, MemoryTransport
from horizonrl.common.errors import CheckpointMismatch, LogGap, RunFailed
from horizonrl.common.state import Progress
from horizonrl.common.types import Kind
from horizonrl.learner.controller.audit import Audit
from horizonrl.learner.engine.thread import EngineThread
from horizonrl.learner.records.checkpoint import CheckpointStore
from horizonrl.learner.records.replay import Replay
from horizonrl.ops.rundir.lines import read_lines
from tests.brokers import Broker, broker
from tests.learner.world import EVALUATING, HashEngine, InlineExecutor, MortalTransport, World
from tests.records import make_group

__all__ = ["broker"]


def cut(server: MemoryServer, stream: Stream, lost: int) -> None:
    """Take the last messages off a stream, as if they had never been stored."""
    held = server.runs["run"].streams[stream]
    for sequence in range(held.last_sequence - lost + 1, held.last_sequence + 1):
        if sequence in held.messages:
            held.remove(sequence)
    held.last_sequence -= lost
    held.ids = {
        name: sequence for name, sequence in held.ids.items() if sequence <= held.last_sequence
    }


async def first_half(world: World) -> None:
    """Train until a checkpoint is far enough from the first step, and stop the learner, which writes another."""
    running, checkpoints = (
        asyncio.create_task(world.run()),
        CheckpointStore(world.config.run_dir / "checkpoints", 2),
    )
    while (newest := checkpoints.newest()) is None or newest.step < 4:
        await asyncio.sleep(0.005)
    world.stopping.set()
    await asyncio.sleep(0.05)
    running.cancel()
    await asyncio.wait([running])


def check_ends(world: World) -> None:
    """Each ticket that was issued has ended once, in the ledger or in an evaluation."""
    lines = world.ledger()
    assert [line["step"] for line in lines] == list(range(1, world.config.total_steps + 1))
    ends = Counter(ticket for line in lines for _, ticket in [*line["trained"], *line["voids"]])
    ends.update(ticket for line in lines for _, ticket, _ in line["dropped"])
    ends.update(ticket for line in world.evals() for _, ticket, _ in line["ends"])
    assert set(ends.values()) == {1}
    for kind in Kind:
        numbers = sorted(
            int(ticket.partition("-")[2]) for ticket in ends if ticket.startswith(kind.value)
        )
        assert numbers == list(range(len(numbers)))
    assert world.metrics.value("conservation_violations") == 0


async def regrow(world: World, beyond: int) -> None:
    """Let the controller find what is lost, and an actor play it again, while the learner is away."""
    asyncio.get_running_loop().set_default_executor(InlineExecutor())
    log = world.server.runs["run"].streams[Stream.GROUPS]
    programs = {"actor": world._act, "controller": world._control}
    alive = [
        asyncio.create_task(world._relive(role, program)) for role, program in programs.items()
    ]
    async with asyncio.timeout(10):
        while log.last_sequence <= beyond:
            await asyncio.sleep(0.01)
    for role in alive:
        role.cancel()
    await asyncio.wait(alive)


@pytest.mark.parametrize(
    ("lost", "regrown", "tickets"),
    [(1, False, 0), (6, False, 0), (4, False, 4), (1, True, 0), (3, True, 4)],
)
async def test_a_run_goes_on_from_what_a_power_cut_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: int, regrown: bool, tickets: int
) -> None:
    monkeypatch.setattr("horizonrl.learner.records.replay.ENTRY_WAIT_S", 0.1)

    world = World(tmp_path, overrides=EVALUATING)
    await first_half(world)
    checkpoint = CheckpointStore(world.config.run_dir / "checkpoints", 2).newest()
    assert checkpoint is not None
    log = world.server.runs["run"].streams[Stream.GROUPS]
    cut(world.server, Stream.GROUPS, log.last_sequence - checkpoint.state["cursor"] + lost)
    cut(world.server, Stream.TICKETS, tickets)
    again = World(tmp_path, server=world.server, overrides=EVALUATING, seed=7)
    again._too_early = lambda *_: False  # type: ignore[method-assign]  # a lost ticket is found after older ones
    if regrown:
        await regrow(again, checkpoint.state["cursor"])
    await again.run()
    check_ends(again)
    (_, event) = read_lines(again.config.run_dir / "lineages.jsonl")
    assert event["log_cut"] == {"cursor": checkpoint.state["cursor"], "read_on_after": 0}
    await check_replay(again, checkpoint.step)


def replay_of(world: World) -> Replay:
    lineages = read_lines(world.config.run_dir / "lineages.jsonl")
    engine, transport = (
        EngineThread(HashEngine(), InlineExecutor()),
        MemoryTransport(world.server, "run"),
    )
    return Replay(
        world.config,
        transport,
        GroupLog(transport),
        engine,
        world.rules,
        world.config.run_dir / "frame",
        lineages,
    )


async def check_replay(world: World, cut_step: int) -> None:
    """What was trained since the cut replays; of what was trained before, replay says that it is lost."""
    for checkpoint in CheckpointStore(world.config.run_dir / "checkpoints", 2).all():
        if cut_step <= checkpoint.step < world.config.total_steps:
            later = world.ledger()[checkpoint.step :]
            assert all([done.equal async for done in replay_of(world).steps(checkpoint, later)])
    assert [done.equal async for done in replay_of(world).steps(None, world.ledger()[:1])] == [True]
    with pytest.raises(RunFailed, match=rf"a power cut .* --from {cut_step}"):
        assert [done async for done in replay_of(world).steps(None, world.ledger())]


async def test_a_broker_that_has_never_held_anything_is_not_the_one_that_was_read(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    await world.run()
    elsewhere = World(tmp_path, overrides=("--rl.steps=9",))
    with pytest.raises(ExceptionGroup) as refused:
        await elsewhere.learner(MortalTransport(elsewhere.server, None)).run()
    assert refused.group_contains(
        CheckpointMismatch, match="not the log that was read before", depth=2
    )


async def test_entries_of_a_log_that_was_cut_and_has_grown_again_are_not_freed_for_an_old_cursor(
    tmp_path: Path,
) -> None:
    """The kept checkpoints count entries that are no longer those of the log."""

    freed = ("--learner.keep_log=false", "--learner.checkpoint_every=1")
    world = World(tmp_path, overrides=freed)
    await first_half(world)
    held = world.server.runs["run"].streams[Stream.GROUPS]
    cut(world.server, Stream.GROUPS, held.last_sequence - held.first_sequence)
    again = World(tmp_path, server=world.server, overrides=freed, seed=7)
    await again.run()
    check_ends(again)


async def test_a_place_is_the_cursor_as_long_as_the_log_is_the_one_that_was_read(
    broker: Broker,
) -> None:
    async with broker.open() as transport:
        log = GroupLog(transport)
        assert await resume_position(transport, 0, "") == 0
        for number in range(6):
            await log.publish(make_group(number))
        reader = await log.read(0)
        marks = [(await reader.next(5.0)).digest for _ in range(6)]  # type: ignore[union-attr]
        await reader.close()
        assert len(set(marks)) == 6
        assert await resume_position(transport, 4, marks[3]) == 4
        assert await resume_position(transport, 4, "") == 4  # of an older release
        assert await resume_position(transport, 4, marks[4]) == 0  # another entry is there
        assert await resume_position(transport, 9, "x") == 0  # it ends before
        await log.purge_below(4)
        assert await resume_position(transport, 4, marks[3]) == 4
        # Its entry is purged, and nothing after it.
        assert await resume_position(transport, 3, marks[2]) == 3
        assert await resume_position(transport, 9, "x") == 3
        with pytest.raises(LogGap, match="has been purged"):
            await resume_position(transport, 2, marks[1])


async def test_a_reader_whose_broker_comes_back_with_another_end_says_so() -> None:
    """Otherwise it would pass over what was stored at the sequences that it has read already."""

    transport = MemoryTransport(MemoryServer(), "run")
    log = GroupLog(transport)
    for number in range(4):
        await log.publish(make_group(number))
    reader = await log.read(0)
    for _ in range(4):
        await reader.next(1.0)
    transport.counters.reconnects += 1
    await log.publish(make_group(4))
    assert await reader.next(1.0) == Entry(5, make_group(4))
    cut(transport.server, Stream.GROUPS, 2)
    transport.counters.reconnects += 1
    for number in range(5, 9):
        await log.publish(make_group(number))
    with pytest.raises(LogGap, match="start the learner again"):
        await reader.next(1.0)


def test_a_ticket_that_a_power_cut_took_with_its_group_is_found_though_the_log_ends_earlier_now() -> (
    None
):
    audit = Audit()
    assert audit.vanished(Progress(cursor=10), {"train-00000009"}, log_end=20) == set()
    assert audit.vanished(Progress(cursor=14), {"train-00000009"}, log_end=14) == {"train-00000009"}
