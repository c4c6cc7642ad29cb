"""The cost of equal success, against curves whose answer is known."""

import numpy as np
import pytest

from horizonrl.ops.studies.contrasts import END, contrasts, end_cost
from horizonrl.ops.studies.outcome import Curve, RunOutcome, Success
from horizonrl.ops.studies.study import Pair

EPISODES = 1_000_000.0
"""So many that only the seeds vary."""


def outcome(variant: str, seed: int, seconds: list[float], rates: list[float]) -> RunOutcome:
    along = np.array(seconds)
    successes, episodes = EPISODES * np.array(rates), np.full(len(rates), EPISODES)
    curve = Curve(np.arange(float(len(rates))), along, along, along, along, successes, episodes)
    start, final = (Success(float(successes[place]), EPISODES) for place in (0, -1))
    return RunOutcome(
        variant,
        seed,
        start,
        final,
        curve,
        "validation",
        *(None,) * 5,
        False,
        None,
        0,
        0,
        wall_s=seconds[-1],
    )


def test_an_arm_that_trains_as_well_in_a_third_of_the_time_needs_a_third() -> None:
    quick = [outcome("quick", seed, [0, 50, 100], [0.4, 0.6, 0.8]) for seed in range(3)]
    slow = [outcome("slow", seed, [0, 150, 300], [0.4, 0.6, 0.8]) for seed in range(3)]
    found = end_cost(quick, slow, "seconds")
    assert (found.success, found.spent, found.against_spent) == pytest.approx(
        (0.8, 100, 300), rel=1e-2
    )
    assert found.ratio == pytest.approx(1 / 3, rel=1e-2)
    assert found.low == pytest.approx(1 / 3, rel=0.05)
    assert found.high == pytest.approx(1 / 3, rel=0.05)
    assert end_cost(slow, quick, "seconds").ratio == pytest.approx(3, rel=1e-2)


def test_the_success_is_that_of_the_arm_that_ends_lower() -> None:
    higher = [outcome("higher", 0, [0, 100], [0.4, 0.8])]
    lower = [outcome("lower", 0, [0, 100], [0.4, 0.6])]
    found = end_cost(higher, lower, "seconds")
    assert (found.success, found.spent, found.against_spent) == pytest.approx(
        (0.6, 50, 100), rel=1e-2
    )
    assert found.ratio == pytest.approx(0.5, rel=1e-2)


def test_a_success_that_was_there_from_the_start_has_no_ratio() -> None:
    falls = [outcome("falls", 0, [0, 100], [0.4, 0.2])]
    rises = [outcome("rises", 0, [0, 100], [0.4, 0.6])]
    found = end_cost(rises, falls, "seconds")
    assert (found.spent, found.against_spent, found.ratio, found.high) == (0, 0, None, None)


def test_it_stands_with_every_cost_and_not_with_the_comparison_of_the_ends() -> None:
    runs = [outcome("a", 0, [0, 50], [0.4, 0.8]), outcome("b", 0, [0, 100], [0.4, 0.8])]
    axes = ["environment_steps", "seconds"]
    found = {each.axis: each.end_cost for each in contrasts([Pair("a", "b", False)], runs, axes)}
    assert found.pop(END) is None
    for axis in axes:
        cost = found[axis]
        assert cost is not None
        assert cost.ratio == pytest.approx(0.5, rel=1e-2)
