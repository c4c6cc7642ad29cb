import json
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horizonrl.broker.codec import decode, encode
from horizonrl.broker.groups import DeadLetter, Entry
from horizonrl.common.types import (
    Branch,
    DropReason,
    Group,
    Kind,
    Phase,
    PolicyVersion,
    Provenance,
    Sampling,
    StopReason,
    Turn,
    Void,
)
from horizonrl.learner.intake.accounts import TicketAccounts
from horizonrl.learner.intake.collector import Collector, LearnerPosition, PendingBatch, Rules
from horizonrl.learner.records.journal import Journal
from horizonrl.learner.records.report import processed_tokens
from tests.learner.branching import branching_group
from tests.learner.sections import make_advantage
from tests.records import make_episode, make_group, make_ticket, make_turn

RULES = Rules(max_staleness=2, vocabulary=100, max_context_tokens=64)
RL = LearnerPosition(version=5, phase=Phase.RL)


def consume(record: Group | Void | DeadLetter, position: LearnerPosition = RL) -> Collector:
    collector = Collector(RULES, TicketAccounts())
    collector.consume(Entry(sequence=1, record=record), position)
    return collector


def why_dropped(
    record: Group | Void | DeadLetter, position: LearnerPosition = RL
) -> list[DropReason]:
    return [drop.reason for drop in consume(record, position).pending.dropped]


def test_a_fresh_group_with_variance_is_admitted_and_stays_outstanding_until_its_step() -> None:
    collector = consume(make_group(version=5))
    assert [group.ticket.number for _, group in collector.pending.admitted] == [0]
    assert collector.accounts.outcomes()[Kind.TRAIN].settled == 0
    collector.commit()
    assert collector.accounts.outcomes()[Kind.TRAIN].trained == 1


@pytest.mark.parametrize(
    ("group", "reason"),
    [
        (make_group(version=2), DropReason.STALE),
        (make_group(version=6), DropReason.LINEAGE),
        (make_group(rewards=(1.0, 1.0), version=5), DropReason.ZERO_VARIANCE),
        (make_group(rewards=(1.0, None), version=5), DropReason.TOO_FEW_VALID),
        (make_group(kind=Kind.DEMO, rewards=(1.0,)), DropReason.PHASE),
        (DeadLetter("not MessagePack", "train-00000003"), DropReason.MALFORMED),
    ],
)
def test_what_may_not_be_trained_is_dropped_with_its_reason(
    group: Group | DeadLetter, reason: DropReason
) -> None:
    assert why_dropped(group) == [reason]


@pytest.mark.parametrize("kind", [Kind.TRAIN, Kind.EVAL])
@pytest.mark.parametrize(
    ("made", "accepted"),
    [
        (Provenance(actor="a", model_digest="m", template_digest="t"), True),
        (Provenance(actor="a"), True),
        (Provenance(actor="a", model_digest="other", template_digest="t"), False),
        (Provenance(actor="a", model_digest="m", template_digest="other"), False),
        (Provenance(actor="a", template_digest="other"), False),
        (Provenance(actor="a", model_digest="m", stop_ids="2 7"), True),
        (Provenance(actor="a", model_digest="m", stop_ids="2"), False),
    ],
)
def test_a_group_of_another_model_or_template_is_malformed(
    made: Provenance, accepted: bool, kind: Kind
) -> None:
    rules = RULES.of_model({"model": "m", "template": "t", "stops": "2 7"})
    collector = Collector(rules, TicketAccounts())
    group = make_group(version=5, kind=kind).model_copy(update={"provenance": made})
    end = collector.consume(Entry(sequence=1, record=group), RL)
    if kind is Kind.EVAL:
        assert end is not None
        assert end.how == ("evaluated" if accepted else "malformed")
    else:
        assert [drop.reason for drop in collector.pending.dropped] == (
            [] if accepted else [DropReason.MALFORMED]
        )


@pytest.mark.parametrize(
    ("kind", "dropped"), [("gae", []), ("reinforce_pp", []), ("grpo", [DropReason.ZERO_VARIANCE])]
)
def test_a_group_of_one_teaches_where_none_is_compared(
    kind: str, dropped: list[DropReason]
) -> None:
    rules = replace(RULES, advantage=make_advantage(kind=kind))
    collector = Collector(rules, TicketAccounts())
    collector.consume(Entry(sequence=1, record=make_group(rewards=(1.0,), version=5)), RL)
    collector.consume(Entry(sequence=2, record=make_group(1, rewards=(None,), version=5)), RL)
    reasons = [drop.reason for drop in collector.pending.dropped]
    assert reasons == [*dropped, DropReason.TOO_FEW_VALID]


def test_the_staleness_bound_is_inclusive() -> None:
    assert why_dropped(make_group(version=3)) == []


def test_token_ids_that_the_model_does_not_have_are_malformed() -> None:
    group = make_group(version=5)
    hostile = make_episode(0, make_turn((100,), 5, 1.0))
    assert why_dropped(group.model_copy(update={"episodes": (hostile, group.episodes[1])})) == [
        DropReason.MALFORMED
    ]


def test_an_episode_longer_than_the_context_is_malformed() -> None:
    group = make_group(version=5)
    long = make_episode(0, make_turn((5,) * 65, 5, 1.0))
    assert why_dropped(group.model_copy(update={"episodes": (long, group.episodes[1])})) == [
        DropReason.MALFORMED
    ]


def test_a_group_of_which_everything_is_masked_teaches_nothing() -> None:
    group = make_group(version=5)
    cut = group.model_copy(
        update={
            "episodes": tuple(
                e.model_copy(update={"stop": StopReason.HORIZON}) for e in group.episodes
            )
        }
    )
    masking = replace(RULES, advantage=make_advantage(truncated="mask"))
    assert RULES.has_signal(cut) and masking.has_signal(group) and not masking.has_signal(cut)


def test_broken_episodes_never_enter_the_baseline() -> None:
    with_broken = consume(make_group(rewards=(1.0, None, 0.0), version=5)).batch(5)
    without = consume(make_group(rewards=(1.0, 0.0), version=5)).batch(5)
    assert len(with_broken.traces) == 2
    for one, other in zip(with_broken.traces, without.traces, strict=True):
        assert (one.group, other.group) == (0, 0)
        np.testing.assert_array_equal(one.rewards_L, other.rewards_L)


def test_a_group_delivered_twice_is_settled_once() -> None:
    collector = Collector(RULES, TicketAccounts())
    for sequence in (1, 2):
        collector.consume(Entry(sequence, make_group(version=5)), RL)
    assert (len(collector.pending.admitted), collector.pending.repeats) == (1, 1)
    collector.commit()
    collector.consume(Entry(3, make_group(version=5)), RL)
    collector.consume(Entry(4, Void(ticket=make_ticket(), reason="late", actor="a")), RL)
    assert collector.pending.repeats == 2
    assert collector.accounts.outcomes()[Kind.TRAIN].settled == 1


@pytest.mark.parametrize(
    ("record", "how", "evaluated"),
    [
        # As stale and flat as it may be.
        (make_group(rewards=(1.0, 1.0), version=0, kind=Kind.EVAL), "evaluated", 1),
        (make_group(rewards=(None,), version=5, kind=Kind.EVAL), "evaluated", 1),
        (make_group(version=6, kind=Kind.EVAL), "lineage", 0),
        (Void(ticket=make_ticket(kind=Kind.EVAL), reason="late", actor="a"), "void", 0),
        (DeadLetter("not MessagePack", "eval-00000000"), "malformed", 0),
    ],
)
def test_an_eval_ticket_ends_at_once_and_takes_no_part_in_the_step(
    record: Group | Void | DeadLetter, how: str, evaluated: int
) -> None:
    collector = Collector(RULES, TicketAccounts())
    end = collector.consume(Entry(1, record), RL)
    assert end is not None
    assert (end.sequence, end.number, end.how) == (1, 0, how)
    outcomes = collector.accounts.outcomes()[Kind.EVAL]
    assert (outcomes.settled, outcomes.evaluated) == (1, evaluated)
    assert collector.pending == PendingBatch()
    assert collector.consume(Entry(2, record), RL) is None
    assert collector.pending == PendingBatch(repeats=0 if isinstance(record, DeadLetter) else 1)


@pytest.mark.parametrize(
    "record",
    [
        make_group(version=5),
        make_group(version=5, kind=Kind.EVAL),
        Void(ticket=make_ticket(), reason="gone", actor="a"),
        DeadLetter("not MessagePack", "train-00000000"),
    ],
)
def test_an_entry_of_a_ticket_that_was_never_issued_is_passed_over_and_its_ticket_stays_open(
    record: Group | Void | DeadLetter,
) -> None:
    collector = Collector(RULES, TicketAccounts())
    entry = Entry(7, record, digest="m")
    collector.pass_over(entry)
    assert (collector.cursor, collector.mark) == (7, "m")
    assert collector.pending == PendingBatch(unissued=[7])
    assert all(outcomes.settled == 0 for outcomes in collector.accounts.outcomes().values())
    assert entry.ends is not None
    assert not collector.accounts.ended(*entry.ends)
    # The honest one, once the ticket has been issued.
    collector.consume(Entry(8, make_group(version=5)), RL)
    assert [sequence for sequence, _ in collector.pending.admitted] == [8]
    assert collector.pending.repeats == 0
    assert collector.commit().unissued == [7]
    assert collector.pending.unissued == []


def test_demonstrations_are_trained_whatever_they_earned() -> None:
    position = LearnerPosition(version=0, phase=Phase.IMITATION)
    collector = consume(make_group(kind=Kind.DEMO, rewards=(1.0,)), position)
    (trace,) = collector.batch(0).traces
    assert trace.demo


@pytest.mark.parametrize("kind", ["reinforce_pp", "gae", "vtrace"])
def test_a_group_of_equal_returns_is_trained_by_a_kind_that_compares_no_siblings(kind: str) -> None:
    rules = replace(RULES, advantage=make_advantage(kind=kind))
    collector = Collector(rules, TicketAccounts())
    collector.consume(Entry(sequence=1, record=make_group(rewards=(1.0, 1.0), version=5)), RL)
    assert len(collector.pending.admitted) == 1


def test_cloning_by_return_drops_a_group_that_earned_nothing() -> None:
    rules = replace(RULES, advantage=make_advantage(kind="return"))
    for rewards, admitted in (((0.0, 0.0), 0), ((1.0, 1.0), 1)):
        collector = Collector(rules, TicketAccounts())
        collector.consume(Entry(sequence=1, record=make_group(rewards=rewards, version=5)), RL)
        assert len(collector.pending.admitted) == admitted


def test_each_trace_knows_its_group() -> None:
    collector = Collector(RULES, TicketAccounts())
    for number in (0, 1):
        collector.consume(
            Entry(sequence=number + 1, record=make_group(number=number, version=5)), RL
        )
    assert [trace.group for trace in collector.batch(5).traces] == [0, 0, 1, 1]


# The collector is a function of the log: the property behind exact resume (docs/invariants.md: order decides).

entries = st.lists(
    st.one_of(
        st.builds(
            make_group,
            number=st.integers(0, 12),
            rewards=st.sampled_from([(1.0, 0.0), (1.0, 1.0), (None, 1.0), (0.0, 0.5, None)]),
            version=st.integers(0, 4),
        ),
        st.builds(lambda n: Void(ticket=make_ticket(n), reason="r", actor="a"), st.integers(0, 12)),
        st.builds(lambda n: DeadLetter("bad", f"train-{n:08d}"), st.integers(0, 12)),
        st.just(DeadLetter("bad", None)),
    ),
    max_size=40,
)


def steps_over(
    log: Sequence[Entry], collector: Collector, version: int
) -> list[tuple[int, str, str]]:
    """Run the learner's consumption over a log: (cursor, data digest, accounts) after each step of two groups."""
    steps = []
    for entry in log:
        if entry.sequence <= collector.cursor:
            continue
        collector.consume(entry, LearnerPosition(version, Phase.RL))
        if len(collector.pending.admitted) == 2:
            digest = collector.batch(version).digest()
            collector.commit()
            version += 1
            steps.append((collector.cursor, digest, json.dumps(collector.accounts.dump())))
    return steps


@given(entries, st.integers(0, 20))
def test_a_learner_resumed_at_any_commit_trains_the_same_batches(
    records: list[Group | Void | DeadLetter], crash: int
) -> None:
    log = [Entry(sequence, record) for sequence, record in enumerate(records, start=1)]
    undisturbed = steps_over(log, Collector(RULES, TicketAccounts()), 0)
    if not undisturbed:
        return
    version = crash % len(undisturbed)
    cursor, _, accounts = undisturbed[version]
    resumed = steps_over(
        log, Collector(RULES, TicketAccounts.restore(json.loads(accounts)), cursor), version + 1
    )
    assert resumed == undisturbed[version + 1 :]


@given(entries)
def test_each_ticket_ends_at_most_once_and_every_end_is_counted(
    records: list[Group | Void | DeadLetter],
) -> None:
    collector = Collector(RULES, TicketAccounts())
    steps_over(
        [Entry(sequence, record) for sequence, record in enumerate(records, start=1)], collector, 0
    )
    named = {record.ticket.number for record in records if isinstance(record, Group | Void)}
    named |= {
        int(record.ticket_id[6:])
        for record in records
        if isinstance(record, DeadLetter) and record.ticket_id
    }
    ended = {number for number in range(13) if collector.accounts.ended(Kind.TRAIN, number)}
    in_draft = {group.ticket.number for _, group in collector.pending.admitted}
    assert ended | in_draft == named
    assert ended.isdisjoint(in_draft)
    assert collector.accounts.outcomes()[Kind.TRAIN].settled == len(ended)


def test_a_malformed_group_is_dropped_and_measured_by_nothing_even_in_another_phase() -> None:
    group = make_group(version=5)
    hostile = make_episode(0, make_turn((100,), 5, 1.0))
    malformed = group.model_copy(update={"episodes": (hostile, *group.episodes[1:])})
    for phase in Phase:
        collector = consume(malformed, LearnerPosition(version=5, phase=phase))
        assert [drop.reason for drop in collector.pending.dropped] == [DropReason.MALFORMED]
        assert collector.pending.consumed == []


def test_a_turn_longer_than_the_ticket_ordered_is_malformed() -> None:
    group = make_group(version=5)
    sampling = group.ticket.sampling.model_copy(update={"max_turn_tokens": 2})
    assert why_dropped(group) == []
    ordered = group.ticket.model_copy(update={"sampling": sampling})
    assert why_dropped(group.model_copy(update={"ticket": ordered})) == [DropReason.MALFORMED]


def test_branches_become_traces_of_their_group_and_each_knows_its_sampler() -> None:
    group = branching_group(2, version=5)
    collector = consume(group)
    traces, sampled = collector.batch(5).traces, collector.pending.sampled()
    assert len(traces) > len(group.episodes)
    assert [tokens.total() for tokens in sampled] == [trace.trained_tokens for trace in traces]
    assert collector.pending.newest_policy() == PolicyVersion(version=5)
    index = collector.pending.trace_index(PolicyVersion(version=5))
    assert index is not None and (traces[index].versions_L == 5).any()


def branched_group(*turns: Turn, kind: Kind = Kind.TRAIN, prompt: int = 2) -> Group:
    """Return a group of two, the first of which has a branch with a prompt of so many ids."""
    first = make_episode(0, *turns, branches=[Branch(prompt_ids=(1,) * prompt)])
    second = make_episode(1, make_turn(version=5))
    ticket = make_ticket(kind=kind, version=5)
    return Group(ticket=ticket, episodes=(first, second), provenance=Provenance(actor="a"))


BRANCH_TURN = make_turn((5, 6), 5, branch=1)


@pytest.mark.parametrize(
    ("group", "reasons"),
    [
        (branched_group(make_turn(version=5, reward=1.0), BRANCH_TURN), []),
        # The context bounds each sequence: this episode's two are longer together.
        (branched_group(make_turn((7,) * 40, 5, 1.0), BRANCH_TURN, prompt=62), []),
        (
            branched_group(make_turn(version=5, reward=1.0), BRANCH_TURN, prompt=63),
            [DropReason.MALFORMED],
        ),
        (
            branched_group(make_turn(version=5), make_turn((100,), 5, 1.0, branch=1)),
            [DropReason.MALFORMED],
        ),
        (
            branched_group(make_turn(version=5), make_turn((9,) * 65, 5, 1.0, branch=1)),
            [DropReason.MALFORMED],
        ),
    ],
)
def test_each_branch_is_bounded_as_an_episode_is(group: Group, reasons: list[DropReason]) -> None:
    assert why_dropped(group) == reasons


@pytest.mark.parametrize("kind", ["gae", "vtrace", "dpo"])
def test_an_advantage_along_one_sequence_drops_groups_with_several(kind: str) -> None:
    rules = replace(RULES, advantage=make_advantage(kind=kind))
    linear = make_group(1, version=5)
    for sequence, (group, reasons) in enumerate(
        [(branching_group(2, version=5), ["malformed"]), (linear, [])], 1
    ):
        collector = Collector(rules, TicketAccounts())
        collector.consume(Entry(sequence=sequence, record=group), RL)
        assert [drop.reason for drop in collector.pending.dropped] == reasons


def test_a_dropped_group_is_kept_at_about_the_size_of_its_message_and_read_as_before(
    tmp_path: Path,
) -> None:
    episodes = [
        make_episode(index, make_turn(range(300, 1300), 5, answer=range(400))) for index in range(2)
    ]
    ticket = make_ticket(version=5).model_copy(update={"sampling": Sampling(max_turn_tokens=1000)})
    group = Group(ticket=ticket, episodes=tuple(episodes), provenance=Provenance(actor="test"))
    data = encode(group)
    collector = Collector(
        replace(RULES, vocabulary=2000, max_context_tokens=2000), TicketAccounts()
    )
    assert decode(data, Group) == group
    tracemalloc.start()
    try:
        collector.consume(Entry(1, decode(data, Group)), RL)
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [drop.reason for drop in collector.pending.dropped] == [DropReason.ZERO_VARIANCE]
    assert kept_bytes < 2 * len(data)
    journal = Journal(tmp_path)
    journal.write_episodes(1, collector.pending.consumed)
    journal.write_episodes(2, [group])
    kept, whole = sorted(tmp_path.glob("episodes/*"))
    assert kept.read_text() == whole.read_text()
    assert (
        processed_tokens(collector.pending.consumed[0].episodes[0])
        == processed_tokens(group.episodes[0])
        == 1403
    )


def test_a_group_that_was_ordered_at_another_temperature_is_dropped() -> None:
    for temperature, dropped in ((1.0, []), (0.5, [DropReason.TEMPERATURE]), (None, [])):
        collector = Collector(replace(RULES, temperature=temperature), TicketAccounts())
        collector.consume(Entry(sequence=1, record=make_group(version=5)), RL)
        assert [drop.reason for drop in collector.pending.dropped] == dropped
