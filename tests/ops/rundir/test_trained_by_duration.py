"""Selection by duration: what is trained less often because it takes long is shown."""

import random
from itertools import pairwise
from typing import Any

import pytest

from horizonrl.common.metrics import Metrics
from horizonrl.common.types import DropReason, Group, Kind, Phase, PolicyVersion
from horizonrl.learner.intake.collector import Drop, PendingBatch
from horizonrl.learner.records.report import StepTimes, metrics_line, mirror_metrics
from horizonrl.ops.rundir.trained_by_duration import tenths, warning
from tests.ops.report.runs import STATS
from tests.records import make_group


def lines(
    slow_trained: float, quick_trained: float = 1.0, groups: int = 400, alike: float = 0.0
) -> list[Any]:
    """Return the lines of steps of ten groups, of which one in ten takes ten times as long."""
    dice, found = random.Random(0), []
    for _ in range(groups // 10):
        durations: dict[str, list[float]] = {}
        for place in range(10):
            share = slow_trained if place == 0 else quick_trained
            end = (
                "trained"
                if dice.random() < share
                else "zero_variance"
                if dice.random() < alike
                else "stale"
            )
            durations.setdefault(end, []).append(dice.uniform(1, 2) * (10 if place == 0 else 1))
        found.append({"durations": durations})
    return found


def test_each_tenth_has_its_bounds_and_its_ends() -> None:
    found = tenths(lines(slow_trained=0.0))
    assert [tenth.share for tenth in found] == [1.0] * 9 + [0.0]
    assert [tenth.trained + tenth.refused for tenth in found] == [40] * 10
    assert all(one.high_s <= two.low_s for one, two in pairwise(found))
    assert found[-1].low_s >= 10


@pytest.mark.parametrize(
    ("slow", "quick", "alike", "told"),
    [
        (0.1, 1.0, 0.0, True),
        (0.4, 0.9, 0.0, True),
        (0.6, 1.0, 0.0, False),
        (1.0, 1.0, 0.0, False),
        (0.1, 1.0, 1.0, False),  # the others earned the same: nobody refused them
    ],
)
def test_it_is_told_if_the_slowest_tenth_is_trained_less_than_half_as_often(
    slow: float, quick: float, alike: float, told: bool
) -> None:
    text = warning(lines(slow, quick, alike=alike))
    assert (text is not None) == told
    assert text is None or "of the slowest tenth of groups (over 1" in text


def test_nothing_is_said_of_too_few_groups_or_of_a_journal_without_durations() -> None:
    assert (
        tenths([])
        == tenths([{}, {"durations": {}}])
        == tenths([{"durations": {"stale": [1.0] * 9}}])
        == []
    )
    assert warning(lines(0.0, groups=40)) is None
    assert len(tenths([{"durations": {"trained": [0.5] * 23}}])) == 10


def timed(number: int, seconds: float, kind: Kind = Kind.TRAIN) -> Group:
    times = {"started_at_ms": 1_000, "finished_at_ms": 1_000 + round(1_000 * seconds)}
    return make_group(number, kind=kind).model_copy(update=times)


def test_a_step_records_how_long_its_train_groups_took_by_their_end() -> None:
    groups = [timed(0, 2.5), timed(1, 40.0), timed(2, 3.0), timed(3, 1.0, Kind.DEMO), make_group(4)]
    dropped = [Drop(2, groups[1].ticket.ticket_id, DropReason.STALE)]
    pending = PendingBatch(
        admitted=[(1, groups[0]), (3, groups[2])], consumed=groups, dropped=dropped
    )
    line = metrics_line(
        Phase.RL,
        PolicyVersion(version=1),
        pending,
        STATS,
        StepTimes(1.0, 2.0, 0.1, 2, ended_at=1e9),
    )
    assert line["durations"] == {"trained": [2.5, 3.0], "stale": [40.0]}
    metrics = Metrics()
    mirror_metrics(metrics, line, pending)
    assert metrics.value("group_seconds_count", end="trained") == 2
    assert metrics.value("group_seconds_bucket", end="stale", le="30.0") == 0
    assert metrics.value("group_seconds_bucket", end="stale", le="100.0") == 1
