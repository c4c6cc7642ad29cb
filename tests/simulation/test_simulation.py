"""The simulation holds, it repeats itself exactly, and it sees what is wrong."""

import pytest

from tests.simulation.run import simulate
from tests.simulation.selection import selection


@pytest.mark.parametrize("seed", range(30))
def test_a_run_keeps_the_invariants_whatever_befalls_it(seed: int) -> None:
    assert simulate(seed).findings == []


def test_a_seed_is_the_same_run_each_time() -> None:
    first, again, other = (simulate(seed, trace=True) for seed in (3, 3, 7))
    assert first.lines == again.lines
    assert first.digest == again.digest != other.digest


def test_selection_by_duration_shows() -> None:
    fair = selection([(float(n), n % 2 == 0) for n in range(100)])
    assert fair["quick"] == fair["slow"] == 0.5 and fair["z"] == 0.0
    assert selection([(float(n), n < 80) for n in range(100)])["z"] > 4
    assert selection([]) == {}
