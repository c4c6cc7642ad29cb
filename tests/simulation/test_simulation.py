"""The simulation holds, it repeats itself exactly, and it sees what is wrong."""

import ast
import subprocess
import sys

import pytest

from tests.simulation.mutants import MUTANTS, ROOT, hunt
from tests.simulation.run import simulate
from tests.simulation.selection import selection

LATE_WORD = 553
"""A seed in which a killed learner's last word comes late."""


@pytest.mark.parametrize("seed", [*range(25), LATE_WORD])
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


def test_every_mutant_is_a_program_that_differs_from_its_file() -> None:
    assert len(MUTANTS) == len(set(MUTANTS)) >= 40
    for mutant in MUTANTS:
        ast.parse(mutant.applied())
        assert mutant.applied() != (ROOT / mutant.file).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "why",
    [
        "a crash between the two loses the group",
        "a living actor loses its lease",
    ],
)
def test_a_mutant_is_killed(why: str) -> None:
    (number,) = [number for number, mutant in enumerate(MUTANTS) if mutant.why == why]
    report = hunt(number, range(3))
    assert report["killed"], report


def test_a_seed_is_printed_with_its_trace() -> None:
    words = [sys.executable, "-m", "tests.simulation", "--seed", "4", "--trace"]
    shown = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=True).stdout
    assert "learner.1 commit" in shown and "0 of 1 seeds fail" in shown
