"""Tests against published values and exact enumerations."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horizonrl.ops.studies.significance import (
    fisher_exact,
    holm,
    paired_test,
    student_interval,
    student_quantile,
    student_share,
)


@pytest.mark.parametrize(
    ("degrees", "quantile"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (30, 2.042), (120, 1.980)],
)
def test_the_quantiles_are_those_of_the_printed_tables(degrees: int, quantile: float) -> None:
    assert student_quantile(0.95, degrees) == pytest.approx(quantile, abs=6e-4)


@pytest.mark.parametrize("degrees", [1, 2, 5, 8])
def test_the_share_is_the_integral_of_the_density(degrees: int) -> None:
    scale = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(
        degrees * math.pi
    )
    grid = np.linspace(-1.7, 1.7, 200_001)
    density = scale * (1 + grid**2 / degrees) ** (-(degrees + 1) / 2)
    assert student_share(1.7, degrees) == pytest.approx(
        float(np.trapezoid(density, grid)), abs=1e-8
    )


def test_the_interval_and_the_test_are_those_of_the_sleep_data() -> None:
    """Student's own example (Biometrika 6, 1908): ten patients, two drugs; R: t.test(..., paired = TRUE)."""
    first = np.array([0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0])
    second = np.array([1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4])
    tested = paired_test(first, second)
    assert tested is not None
    assert (tested.interval.mean, tested.interval.low, tested.interval.high) == pytest.approx(
        (-1.58, -2.4598858, -0.7001142), abs=1e-6
    )
    assert tested.p == pytest.approx(0.002832890, abs=1e-8)


def test_nothing_is_tested_that_shows_no_spread() -> None:
    """R: t.test(...) stops with "data are essentially constant"."""
    assert (
        student_interval(np.array([0.4])) is None
        and paired_test(np.array([0.4]), np.array([0.1])) is None
    )
    # Two seeds with the same difference, whose last bits differ.
    assert paired_test(np.array([0.3, 0.8]), np.array([0.2, 0.7])) is None
    assert paired_test(np.array([0.5, 0.5]), np.array([0.5, 0.5])) is None


def test_holms_correction_is_that_of_r() -> None:
    """R: p.adjust(c(0.01, 0.02, 0.03, 0.04), "holm") and with the order changed."""
    assert holm([0.01, 0.02, 0.03, 0.04]) == pytest.approx([0.04, 0.06, 0.06, 0.06])
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.6, 0.7]) == [1.0, 1.0] and holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.floats(0.001, 0.2))
def test_holm_rejects_what_its_steps_reject(p_values: list[float], level: float) -> None:
    rejected = set()
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        if p_values[index] * (len(p_values) - rank) > level:
            break
        rejected.add(index)
    assert {index for index, p in enumerate(holm(p_values)) if p <= level} == rejected


def test_fishers_test_is_that_of_the_lady_tasting_tea() -> None:
    """R: fisher.test(matrix(c(3, 1, 1, 3), 2)) and fisher.test(matrix(c(10, 2, 3, 15), 2))."""
    assert fisher_exact(3, 4, 1, 4) == pytest.approx(0.4857143, abs=1e-7)
    assert fisher_exact(10, 12, 3, 18) == pytest.approx(0.0005367241, abs=1e-9)
    assert fisher_exact(0, 5, 0, 5) == 1.0


@given(st.integers(1, 6), st.integers(1, 6), st.data())
def test_fishers_test_counts_the_arrangements_that_are_no_likelier(
    runs: int, others: int, data: st.DataObject
) -> None:
    events, other_events = data.draw(st.integers(0, runs)), data.draw(st.integers(0, others))
    counts = [
        sum(place < runs for place in chosen)
        for chosen in itertools.combinations(range(runs + others), events + other_events)
    ]
    likelier = [count for count in counts if counts.count(count) <= counts.count(events)]
    assert fisher_exact(events, runs, other_events, others) == pytest.approx(
        len(likelier) / len(counts)
    )
