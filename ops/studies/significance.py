"""Tests over few seeds: Student's t, Holm's correction, Fisher's exact test.

Pure functions of numbers, without SciPy, which nothing else here needs. The seed is the unit: more episodes only make
its value more exact.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from horizonrl.ops.studies.statistics import LEVEL, Array, Interval


@dataclass(frozen=True, slots=True)
class PairedTest:
    """The mean of a difference over seeds, with Student's interval and two-sided p."""

    interval: Interval
    p: float


def student_share(t: float, degrees: int) -> float:
    """Return P(|T| < t) of Student's distribution with a whole number of degrees of freedom.

    Abramowitz and Stegun, "Handbook of Mathematical Functions", 26.7.3 and 26.7.4.
    """
    angle = math.atan(t / math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    term, total = (cosine, 0.0) if degrees % 2 else (1.0, 0.0)
    for k in range(1 if degrees % 2 else 0, degrees - 1, 2):
        total += term
        term *= cosine * cosine * (k + 1) / (k + 2)
    return 2.0 / math.pi * (angle + sine * total) if degrees % 2 else sine * total


def student_quantile(share: float, degrees: int) -> float:
    """Return the t with P(|T| < t) = `share`."""
    return _root(lambda t: student_share(t, degrees) - share, 0.0, 1e6)


def student_interval(values_S: Array) -> Interval | None:
    """Return the mean over seeds and its t interval at LEVEL; None if the seeds show no spread, as one seed cannot.

    Rates of a few hundred episodes can be equal by chance: an interval without a width would call that certain.
    """
    if len(values_S) < 2 or np.allclose(values_S, values_S[0], rtol=0.0, atol=1e-9):
        return None
    mean, half = (
        float(np.mean(values_S)),
        student_quantile(LEVEL, len(values_S) - 1) * _error(values_S),
    )
    return Interval(mean, mean - half, mean + half)


def paired_test(after_S: Array, before_S: Array) -> PairedTest | None:
    """Test the mean of `after - before` over the same seeds, or tasks; None if their differences show no spread."""
    differences_S = np.asarray(after_S) - np.asarray(before_S)
    interval = student_interval(differences_S)
    if interval is None:
        return None
    t = abs(interval.mean) / _error(differences_S)
    return PairedTest(interval, 1.0 - student_share(t, len(differences_S) - 1))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return each p corrected for the number of comparisons (S. Holm, Scandinavian Journal of Statistics 6, 1979)."""
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        # Never below the one of a smaller p: a comparison counts only if all that are clearer do.
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = largest
    return corrected


def fisher_exact(events: int, runs: int, other_events: int, other_runs: int) -> float:
    """Return the two-sided p of Fisher's exact test of whether two arms have the same chance of an event."""
    total, all_runs = events + other_events, runs + other_runs
    ways = [
        math.comb(runs, k) * math.comb(other_runs, total - k)
        for k in range(max(0, total - other_runs), min(runs, total) + 1)
    ]
    seen = math.comb(runs, events) * math.comb(other_runs, other_events)
    return sum(way for way in ways if way <= seen) / math.comb(all_runs, total)


def _error(values_S: Array) -> float:
    """Return the standard error of the mean."""
    return float(np.std(values_S, ddof=1)) / math.sqrt(len(values_S))


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    """Return where an increasing function is 0."""
    for _ in range(200):
        middle = (low + high) / 2.0
        low, high = (middle, high) if function(middle) < 0 else (low, middle)
    return (low + high) / 2.0
