"""The time to equal success, against curves whose answer is known."""

import math

import numpy as np
import pytest

from horizonrl.ops.bench.learning.contrasts import END, contrasts, time_ratio
from horizonrl.ops.bench.learning.outcome import Curve, RunOutcome, Success
from horizonrl.ops.bench.learning.study import Pair

EPISODES = 1_000_000.0
"""So many that only the seeds vary."""


def outcome(variant: str, seed: int, seconds: list[float], rates: list[float]) -> RunOutcome:
    along = np.array(seconds)
    successes, episodes = EPISODES * np.array(rates), np.full(len(rates), EPISODES)
    curve = Curve(np.arange(float(len(rates))), along, along, along, along, successes, episodes)
    start, final = (Success(float(successes[place]), EPISODES) for place in (0, -1))
    return RunOutcome(
        variant, seed, start, final, curve, "evaluations", *(None,) * 5, False, None, 0, 0, wall_s=seconds[-1]
    )


def test_an_arm_that_trains_as_well_in_a_third_of_the_time_needs_a_third() -> None:
    quick = [outcome("quick", seed, [0, 50, 100], [0.4, 0.6, 0.8]) for seed in range(3)]
    slow = [outcome("slow", seed, [0, 150, 300], [0.4, 0.6, 0.8]) for seed in range(3)]
    found = time_ratio(quick, slow)
    assert (found.success, found.seconds, found.against_s) == pytest.approx((0.8, 100, 300), rel=1e-2)
    assert found.ratio == pytest.approx(1 / 3, rel=1e-2)
    assert found.low == pytest.approx(1 / 3, rel=0.05)
    assert found.high == pytest.approx(1 / 3, rel=0.05)
    assert time_ratio(slow, quick).ratio == pytest.approx(3, rel=1e-2)


def test_the_success_is_that_of_the_arm_that_ends_lower() -> None:
    higher = [outcome("higher", 0, [0, 100], [0.4, 0.8])]
    lower = [outcome("lower", 0, [0, 100], [0.4, 0.6])]
    found = time_ratio(higher, lower)
    assert (found.success, found.seconds, found.against_s) == pytest.approx((0.6, 50, 100), rel=1e-2)
    assert found.ratio == pytest.approx(0.5, rel=1e-2)


def test_a_success_that_was_there_from_the_start_has_no_ratio() -> None:
    falls = [outcome("falls", 0, [0, 100], [0.4, 0.2])]
    rises = [outcome("rises", 0, [0, 100], [0.4, 0.6])]
    found = time_ratio(rises, falls)
    assert (found.seconds, found.against_s, found.ratio, found.high) == (0, 0, None, None)


def test_the_time_stands_with_the_comparison_of_the_ends_if_seconds_were_measured() -> None:
    runs = [outcome("a", 0, [0, 50], [0.4, 0.8]), outcome("b", 0, [0, 100], [0.4, 0.8])]
    found = {
        each.axis: each.time for each in contrasts([Pair("a", "b", False)], runs, ["environment_steps", "seconds"])
    }
    assert found.keys() == {END, "environment_steps", "seconds"}
    assert found["environment_steps"] is found["seconds"] is None
    time = found[END]
    assert time is not None
    assert time.ratio is not None
    assert math.isclose(time.ratio, 0.5, rel_tol=1e-2)
    (without, _) = contrasts([Pair("a", "b", False)], runs, ["environment_steps"])
    assert without.time is None
