"""The intake, in a whole run: what it waits for, what it passes over, and when it gives up."""

import asyncio
import itertools
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
from structlog.testing import CapturingLogger

from horizonrl.broker.api import Key
from horizonrl.broker.codec import encode
from horizonrl.broker.groups import Entry, GroupLog, LogReader
from horizonrl.broker.memory import MemoryTransport
from horizonrl.broker.state import StateStore
from horizonrl.broker.tickets import TicketQueue
from horizonrl.common.errors import NoGroups, NothingToLearn
from horizonrl.common.state import Progress
from horizonrl.common.types import DropReason, Kind, PolicyVersion, Void
from horizonrl.learner.intake.collector import Drop, PendingBatch
from horizonrl.learner.loop.breaker import GIVE_UP_AFTER, VOID_IN_A_ROW, Breaker
from horizonrl.learner.loop.log_intake import LogIntake
from horizonrl.learner.loop.log_space import LogSpace
from tests.learner.world import EVALUATING, MortalTransport, World, played
from tests.records import make_group, make_ticket


async def test_parts_of_an_ended_ticket_do_not_hide_that_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two actors uploaded one large group; the second one's parts are behind it in the log, and mean nothing."""
    monkeypatch.setattr("horizonrl.learner.loop.log_intake.QUIET_S", 0.05)
    world = World(
        tmp_path, overrides=("--imitation.steps=0", "--rl.steps=1", "--rl.groups_per_step=1")
    )

    transport = MortalTransport(world.server, None)
    lost = make_group(0, rewards=(0.0, 0.0))
    await TicketQueue(transport).issue(lost.ticket)
    await GroupLog(transport).publish(lost)
    await transport.publish(
        "groups.part", b"x", message_id=f"{lost.ticket.end_id}.0123456789abcdef.0"
    )
    learning = asyncio.create_task(world.learner(transport).run())
    async for progress in StateStore(transport).watch(Key.PROGRESS):
        if isinstance(progress, Progress) and progress.settled(Kind.TRAIN):
            break
    learning.cancel()


def test_a_run_whose_last_evaluation_nobody_plays_ends_without_it(tmp_path: Path) -> None:
    world = World(tmp_path, overrides=(*EVALUATING, "--learner.step_timeout_s=2"), idle_from=7)
    asyncio.run(world.run())
    # Rounds overlap: that of a later version may be in before.
    assert sorted(line["version"] for line in world.evals())[:3] == [0, 2, 4]
    assert 7 not in [line["version"] for line in world.evals()]


async def test_a_learner_that_is_stopped_before_the_last_evaluation_is_in_has_not_finished(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, overrides=EVALUATING, idle_from=7)
    running = asyncio.create_task(world.run())
    while len(world.evals()) < 4:  # all but the last one
        await asyncio.sleep(0.01)
    world.stopping.set()
    await asyncio.sleep(0.1)
    progress = await StateStore(MortalTransport(world.server, None)).get(Key.PROGRESS)
    assert isinstance(progress, Progress)
    assert (progress.step, progress.finished) == (7, False)
    running.cancel()
    await asyncio.wait([running])
    again = World(tmp_path, server=world.server, overrides=EVALUATING)
    await again.run()
    await again.check()


@pytest.mark.parametrize(("refused", "warnings"), [(50, 2), (10_000, 5)])
def test_a_step_that_finds_hardly_a_group_to_train_on_says_so_and_gives_up_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: int, warnings: int
) -> None:
    refusals, log = itertools.count(), CapturingLogger()
    monkeypatch.setattr(
        "horizonrl.learner.intake.collector.has_signal", lambda *_: next(refusals) >= refused
    )
    monkeypatch.setattr("horizonrl.learner.loop.breaker.log", log)
    given_up = False
    try:
        asyncio.run(World(tmp_path).run())
    except* NothingToLearn:
        given_up = True
    assert given_up == (refused == 10_000)
    warned = [call.kwargs for call in log.calls if call.args == ("batch_starved",)]
    assert [each["dropped"] for each in warned] == [
        {"zero_variance": 20 << doubling} for doubling in range(warnings)
    ]
    assert all(each["success_rate"] == 0 for each in warned)


def test_a_step_without_signal_gives_up_though_a_full_log_interrupted_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, short = LogIntake._next, [True]

    async def read_or_nothing(self: LogIntake, reader: LogReader, within_s: float) -> Entry | None:
        interrupted = short and len(self._state.collector.pending.dropped) > 30
        return None if interrupted else await read(self, reader, within_s)

    async def is_short(*_: object) -> bool:
        return bool(short) and short.pop()

    monkeypatch.setattr("horizonrl.learner.intake.collector.has_signal", lambda *_: False)
    monkeypatch.setattr(LogIntake, "_next", read_or_nothing)
    monkeypatch.setattr(LogSpace, "is_short", is_short)
    with pytest.raises(ExceptionGroup) as raised:
        asyncio.run(asyncio.wait_for(World(tmp_path).run(), 60))
    # Studies read the success from this message (`Ending.success_at_giving_up`).
    assert raised.group_contains(NothingToLearn, match=r"success rate [\d.]+, mean return -?[\d.]+")
    assert not short


class StandIn:
    """What a breaker asks of a learner's state."""

    groups_wanted, groups_missing = 4, 2

    def __init__(self, step: int) -> None:
        self.step = step
        self.collector = SimpleNamespace(pending=PendingBatch())


def void(number: int) -> Void:
    return Void(
        ticket=make_ticket(number),
        reason="5 deliveries made no group: KeyError: 'b' at my_env.py:30",
        actor="a",
    )


def test_tickets_without_a_group_one_after_another_end_a_run_with_the_last_cause() -> None:
    breaker = Breaker(StandIn(0), 60.0)  # type: ignore[arg-type]
    for number in range(VOID_IN_A_ROW - 1):
        breaker.notice(void(number))
    breaker.notice(make_group())  # one group is a sign of life
    for number in range(VOID_IN_A_ROW - 1):
        breaker.notice(void(number))
    with pytest.raises(
        NoGroups, match=r"the last 32 tickets ended without a group.*KeyError: 'b' at my_env.py:30"
    ):
        breaker.notice(void(99))


def test_a_run_that_has_trained_waits_for_its_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("horizonrl.learner.loop.breaker.time.monotonic", lambda: now[0])
    breaker = Breaker(StandIn(7), 60.0)  # type: ignore[arg-type]
    for number in range(5 * VOID_IN_A_ROW):
        breaker.notice(void(number))
    now[0] += 61
    with pytest.raises(NoGroups, match="the last 161 tickets"):
        breaker.notice(void(0))


@pytest.mark.parametrize(
    ("reason", "advice"),
    [
        (DropReason.MALFORMED, "Actors and learner differ in the model"),
        (
            DropReason.ZERO_VARIANCE,
            "Within a group all episodes earn the same: the policy solves none of these tasks",
        ),
    ],
)
def test_giving_up_names_the_cause_of_most_drops(reason: DropReason, advice: str) -> None:
    state = StandIn(3)
    breaker = Breaker(state, 60.0)  # type: ignore[arg-type]
    state.collector.pending.dropped += [
        Drop(n, f"train-{n:08d}", reason) for n in range(GIVE_UP_AFTER * 4)
    ]
    with pytest.raises(NothingToLearn, match=advice):
        breaker.look()


def test_a_ticket_is_not_ended_before_it_was_issued(tmp_path: Path) -> None:
    """Without ticket keys anybody may write under any id: its ticket stays open, and the honest group is trained."""
    world = World(tmp_path)
    early = make_ticket(3, version=2).model_copy(update={"horizon_turns": 4})
    never = make_ticket(1_000, version=2).model_copy(update={"horizon_turns": 6})
    foreign = [
        ("groups.train", encode(played(early, PolicyVersion(), random.Random(0))), early.end_id),
        ("groups.void", encode(Void(ticket=never, reason="gone", actor="evil")), never.end_id),
        ("groups.train", b"junk", "train-00000004"),
    ]

    async def intrude() -> None:
        transport = MemoryTransport(world.server, "run")
        for subject, data, message_id in foreign:
            await transport.publish(subject, data, message_id=message_id)

    async def scenario() -> None:
        await intrude()
        await world.run()
        await world.check()

    asyncio.run(scenario())
    assert world.metrics.value("log_entries_refused_total", reason="never_issued") == len(foreign)
    assert world.ledger()[0]["never_issued"] == [1, 2, 3]
    ends = [
        end[1]
        for line in world.ledger()
        for end in [*line["trained"], *line["dropped"], *line["voids"]]
    ]
    assert {early.ticket_id, "train-00000004"} <= set(ends)
    assert never.ticket_id not in ends
