"""Waiting: what takes long is trained too, within the bound, and the same after a resume."""

import json
import random
from array import array
from collections import Counter
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horizonrl.broker.groups import DeadLetter, Entry
from horizonrl.common.config.schema import RunConfig
from horizonrl.common.types import DropReason, Group, Kind, Phase, Void
from horizonrl.learner.intake.accounts import TicketNumbers
from horizonrl.learner.intake.collector import Rules
from horizonrl.learner.intake.waiting import Deadline, Waiting
from horizonrl.learner.loop.state import Commit, LearnerState
from horizonrl.learner.main import learner_state
from tests.records import make_group

RULES = Rules(max_staleness=2, vocabulary=100, max_context_tokens=64, demos_in_rl=True)


def config(*overrides: str, steps: int = 9, groups: int = 3, staleness: int = 2) -> RunConfig:
    return RunConfig.load(
        [],
        [
            f"--rl.steps={steps}",
            f"--rl.groups_per_step={groups}",
            f"--rl.max_staleness={staleness}",
            "--imitation.groups_per_step=2",
            *overrides,
        ],
    )


def learner(run: RunConfig) -> LearnerState:
    return learner_state(
        run,
        Rules(
            run.rl.max_staleness,
            vocabulary=100,
            max_context_tokens=64,
            demos_in_rl=run.rl.demos_per_step > 0,
        ),
    )


@dataclass
class Play:
    """A run in virtual time: a controller that issues up to the limit, and actors that have a slot for every ticket.

    A tenth of the tickets takes far longer than all others.
    """

    run: RunConfig
    seed: int = 0
    alike: float = 0.0
    """Share of the groups whose episodes earn the same."""
    void: float = 0.0

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)
        self.state = learner(self.run)
        self.now = 0.0
        self.issued: Counter[Kind] = Counter()
        self.playing: list[tuple[float, int, Kind, int, int]] = []
        self.log: list[Entry] = []
        self.read = 0
        self.batches: list[list[int]] = []
        """The train tickets of each RL step."""
        self.commits: list[tuple[Commit, str]] = []
        """What was committed, as JSON, and the digest of the batch."""
        self.ends: Counter[str] = Counter()
        self.oldest = 0

    def issue(self) -> None:
        state, run = self.state, self.run
        phase, phase_step = run.phase(state.step)
        self._issue_up_to(
            phase.kind, self.settled(phase.kind) + run.outstanding_limit(phase, phase_step)
        )
        if phase is Phase.RL and run.rl.demos_per_step:
            self._issue_up_to(
                Kind.DEMO, run.demos_due(min(phase_step + run.rl.max_staleness + 1, run.rl.steps))
            )

    def settled(self, kind: Kind) -> int:
        return self.state.collector.accounts.outcomes()[kind].settled

    def _issue_up_to(self, kind: Kind, end: int) -> None:
        published = next(
            step for step in range(self.state.step, -1, -1) if step == 0 or self.run.publishes(step)
        )
        for number in range(self.issued[kind], end):
            takes = self.dice.expovariate(1.0) * (30.0 if self.dice.random() < 0.1 else 1.0)
            heappush(self.playing, (self.now + takes, len(self.playing), kind, number, published))
            self.issued[kind] = number + 1

    def arrive(self) -> None:
        self.now, _, kind, number, version = heappop(self.playing)
        rewards = (
            (1.0,)
            if kind is Kind.DEMO
            else (1.0, 1.0)
            if self.dice.random() < self.alike
            else (1.0, 0.0)
        )
        group = make_group(number, rewards, version, kind)
        ended = self.dice.random() < self.void
        record = Void(ticket=group.ticket, reason="broken", actor="test") if ended else group
        self.log.append(Entry(len(self.log) + 1, record, f"mark{len(self.log)}"))

    def play(self) -> "Play":
        while not self.state.complete:
            self.step()
        return self

    def step(self) -> None:
        state = self.state
        while state.groups_missing:
            self.issue()
            while self.read == len(self.log):
                self.arrive()  # raises if nothing is outstanding: the run would stand still
            state.collector.consume(self.log[self.read], state.position)
            self.read += 1
        phase, version = state.phase, state.step
        digest = state.batch().digest()
        pending = state.commit()
        self.ends.update(end for _, end in pending.ends())
        trained = [group for _, group in pending.admitted if group.ticket.kind is Kind.TRAIN]
        if phase is Phase.RL:
            self.batches.append(sorted(group.ticket.number for group in trained))
            self.oldest = max([self.oldest, *(version - group.oldest_version for group in trained)])
        self.commits.append((Commit(**json.loads(json.dumps(vars_of(state.last_commit)))), digest))


def vars_of(commit: Commit) -> dict[str, Any]:
    return {name: getattr(commit, name) for name in Commit.__dataclass_fields__}


@pytest.mark.parametrize("staleness", [0, 1, 2, 8])
def test_without_drops_a_step_trains_the_tickets_that_were_issued_for_it(staleness: int) -> None:
    played = Play(config(staleness=staleness, steps=20)).play()
    first = sorted(number for batch in played.batches[: staleness + 1] for number in batch)
    assert first == list(range(3 * (staleness + 1))), "those of version 0, in any order"
    assert played.batches[staleness + 1 :] == [
        list(range(3 * step, 3 * step + 3)) for step in range(staleness + 1, 20)
    ]
    assert played.oldest == staleness
    assert played.ends == {"trained": 60}


def test_what_comes_first_leaves_slow_tasks_out_if_the_run_does_not_wait() -> None:
    """The comparison: the same play drops about as many groups as there are slow tickets."""
    dropped = Play(config("--rl.stale=drop", steps=40)).play().ends
    assert dropped[DropReason.STALE] > 5
    assert Play(config(steps=40)).play().ends[DropReason.STALE] == 0


RUNS = st.builds(
    config,
    st.sampled_from(["--imitation.steps=0", "--imitation.steps=2"]),
    st.sampled_from(["--rl.demos_per_step=0", "--rl.demos_per_step=2"]),
    steps=st.integers(1, 12),
    groups=st.integers(1, 4),
    staleness=st.sampled_from([0, 1, 2, 8]),
) | st.builds(
    config,
    st.sampled_from(["--rl.publish_every=2", "--rl.publish_every=3"]),
    steps=st.integers(1, 12),
    groups=st.integers(1, 4),
    staleness=st.sampled_from([2, 3]),
)
SHARES = st.sampled_from([0.0, 0.3, 0.7])


@given(run=RUNS, seed=st.integers(0, 1000), alike=SHARES, void=st.sampled_from([0.0, 0.2]))
def test_every_ticket_is_trained_or_judged_within_the_bound_whatever_takes_long(
    run: RunConfig, seed: int, alike: float, void: float
) -> None:
    played = Play(run, seed, alike, void).play()
    assert played.oldest <= run.rl.max_staleness
    assert played.ends.keys() <= {"trained", DropReason.ZERO_VARIANCE}
    assert all(len(batch) == run.rl.groups_per_step for batch in played.batches)
    assert played.settled(Kind.TRAIN) == played.issued[Kind.TRAIN], (
        "nothing is left outstanding at the end"
    )
    assert played.state.last_commit.waiting["held"] == []


@given(run=RUNS, seed=st.integers(0, 1000), alike=SHARES, at=st.floats(0, 1, exclude_max=True))
def test_a_learner_resumed_at_any_commit_trains_the_same_batches(
    run: RunConfig, seed: int, alike: float, at: float
) -> None:
    played = Play(run, seed, alike, void=0.1).play()
    place = int(at * len(played.commits))
    state = learner(run)
    state.restore(vars_of(played.commits[place][0]))
    entries = iter([entry for entry in played.log if entry.sequence > state.collector.read_after])
    for commit, digest in played.commits[place + 1 :]:
        while state.groups_missing:
            entry = next(entries)
            if not state.collector.read_again(entry, state.position):
                state.collector.consume(entry, state.position)
        assert state.batch().digest() == digest
        state.commit()
        assert json.loads(json.dumps(vars_of(state.last_commit))) == vars_of(commit)


def test_a_large_group_that_is_held_takes_4_bytes_per_token_and_is_trained_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = [digest for _, digest in Play(config(), alike=0.3).play().commits]
    monkeypatch.setattr("horizonrl.learner.intake.collector.LARGE_TOKENS", 0)
    held = Held().state.collector.waiting
    assert held is not None
    ((_, group),) = held.release()
    assert {type(turn.output_ids) for episode in group.episodes for turn in episode.turns} == {
        array
    }
    assert [digest for _, digest in Play(config(), alike=0.3).play().commits] == plain


@dataclass
class Held:
    """A learner that waits for ticket 0 and holds the groups of the others."""

    run: RunConfig = field(default_factory=lambda: config(groups=1, staleness=1, steps=5))

    def __post_init__(self) -> None:
        self.state = learner(self.run)
        self.consume(1, make_group(1))  # the other one that was issued at version 0
        self.state.commit()
        self.consume(2, make_group(2, version=1))

    def consume(self, sequence: int, group: Group) -> None:
        self.state.collector.consume(Entry(sequence, group, f"m{sequence}"), self.state.position)


def test_a_step_says_which_ticket_it_waits_for() -> None:
    held = Held()
    assert held.state.awaited() == {
        "ticket": "train-00000000",
        "trainable_until_version": 1,
        "groups_held": 1,
    }
    assert held.state.progress().awaited == "train-00000000"
    assert held.state.groups_missing == 1
    assert held.state.progress().ended(Kind.TRAIN, 2), (
        "the audit must not miss the ticket of a group that is held"
    )
    held.consume(3, make_group(0))
    assert held.state.groups_missing == 0
    assert held.state.progress().awaited is None
    assert [sequence for sequence, _ in held.state.commit().admitted] == [3]
    assert [sequence for sequence, _ in held.state.commit().admitted] == [2], (
        "it was held, and is read no second time"
    )


@pytest.mark.parametrize("how", ["void", "malformed"])
def test_a_ticket_that_ends_without_a_group_is_waited_for_no_longer(how: str) -> None:
    held = Held()
    void = Void(ticket=make_group(0).ticket, reason="gone", actor="test")
    record = void if how == "void" else DeadLetter("junk", "train-00000000")
    held.state.collector.consume(Entry(3, record), held.state.position)
    assert held.state.groups_missing == 0
    assert [sequence for sequence, _ in held.state.commit().admitted] == [2]


def resumed(held: Held, trained: int) -> LearnerState:
    """Return the learner after a commit that held a group, and a resume from it."""
    held.consume(3, make_group(3, version=1))
    held.consume(4, make_group(0))
    held.state.commit()
    commit = json.loads(json.dumps(vars_of(held.state.last_commit)))
    state = learner(held.run)
    state.restore(commit)
    assert (state.collector.cursor, state.collector.read_after) == (4, 1)
    assert state.groups_held == 2
    assert state.progress().ended(Kind.TRAIN, 2)
    assert len(state.collector.accounts.dump()["train"]["ended"]) == trained
    return state


def test_what_a_commit_held_is_read_again_and_what_was_settled_is_no_repeat() -> None:
    state = resumed(Held(), trained=1)
    for sequence, number in ((2, 2), (3, 3)):
        assert state.groups_missing, "not before all that was held is here"
        assert state.collector.read_again(
            Entry(sequence, make_group(number, version=1)), state.position
        )
    assert state.collector.read_again(Entry(4, make_group(0)), state.position)
    assert state.collector.pending.repeats == 0
    assert [sequence for sequence, _ in state.commit().admitted] == [2]


def test_a_held_group_that_cannot_be_read_again_ends_its_ticket() -> None:
    state = resumed(Held(), trained=1)
    assert state.collector.read_again(Entry(2, DeadLetter("a flipped bit")), state.position)
    assert state.collector.read_again(Entry(3, make_group(3, version=1)), state.position)
    assert [drop.ticket_id for drop in state.commit().dropped] == ["train-00000002"]


def test_a_held_group_that_the_log_has_lost_leaves_its_ticket_open() -> None:
    state = resumed(Held(), trained=1)
    assert not state.collector.read_again(Entry(5, make_group(4, version=2)), state.position)
    state.collector.consume(Entry(5, make_group(4, version=2)), state.position)
    progress = state.progress()
    assert not progress.ended(Kind.TRAIN, 2), "so that the controller issues it again"
    assert progress.awaited == "train-00000002"


def test_a_log_that_was_cut_is_read_anew_from_its_start() -> None:
    state = resumed(Held(), trained=1)
    state.move_cursor(0)
    assert state.collector.read_after == 0
    assert not state.progress().ended(Kind.TRAIN, 2)
    for sequence, group in enumerate(
        [make_group(1), make_group(2, version=1), make_group(3, version=1)], 1
    ):
        state.collector.consume(Entry(sequence, group), state.position)
    assert state.collector.pending.repeats == 1
    assert state.groups_missing == 0


def test_a_smaller_bound_on_resuming_drops_what_is_too_old_and_does_not_stand_still() -> None:
    played = Play(config(groups=2, staleness=4, steps=12), seed=3)
    for _ in range(4):
        played.step()
    commit = played.state.last_commit
    played.run = config(groups=1, staleness=1, steps=12)
    played.state = learner(played.run)
    played.state.restore(vars_of(commit))
    for entry in played.log[played.state.collector.read_after : played.read]:
        played.state.collector.read_again(entry, played.state.position)
    played.play()
    assert played.ends[DropReason.STALE]
    assert played.oldest <= 4


def test_a_run_that_dropped_before_begins_to_wait() -> None:
    played = Play(config("--rl.stale=drop", steps=30), seed=5)
    for _ in range(6):
        played.step()
    commit = vars_of(played.state.last_commit)
    assert commit["waiting"] == {}
    played.run = config(steps=30)
    played.state = learner(played.run)
    played.state.restore(commit)
    for _ in range(4):  # what was outstanding at the change
        played.step()
    played.ends.clear()
    played.play()
    assert played.ends == {"trained": 3 * 20}


def test_numbers_that_are_missing_below_a_number_are_counted() -> None:
    numbers = TicketNumbers([(0, 3), (6, 7), (9, 9)])
    assert [numbers.missing_below(number) for number in (0, 2, 4, 5, 7, 9, 12)] == [
        0,
        0,
        0,
        1,
        2,
        3,
        5,
    ]
    assert [numbers.after_missing(count) for count in range(6)] == [0, 5, 6, 9, 11, 12]
    assert all(numbers.missing_below(numbers.after_missing(count)) == count for count in range(9))


def test_deadlines_whose_tickets_have_ended_are_forgotten() -> None:
    run = config(steps=200)
    played = Play(run).play()
    assert (
        max(len(commit.waiting["deadlines"]) for commit, _ in played.commits)
        <= run.rl.max_staleness + 1
    )
    assert Waiting(run, {"deadlines": [[3, 1]]}).dump(learner(run).collector.accounts)[
        "deadlines"
    ] == [list(Deadline(3, 1))]
