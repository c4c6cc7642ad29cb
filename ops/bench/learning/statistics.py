"""Intervals for success over seeds: pure functions of counts, NumPy only.

Axes: S seeds, R resamples; `...` stands for any further axes (points of a curve).

Two things vary: what a seed makes of training, and which episodes happened to be played to measure it. Each resample
draws seeds with replacement and then, for each drawn seed, its successes anew from a binomial distribution. S seeds
show only (S-1)/S of their variance, while that of the episodes is counted twice, as it is in the seeds' differences
too: the variance of the mean is right where that between the seeds is S-1 times that of a seed's episodes, too large
below and too small above. A single seed speaks of its episodes only.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating[Any]]
RESAMPLES = 2000
LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Counts:
    """Successes among episodes, one entry a seed; a curve's further axes are shared by both."""

    successes_S: Array
    episodes_S: Array

    @property
    def rates(self) -> Array:
        return self.successes_S / self.episodes_S

    def resampled_means(self, drawn_RS: NDArray[np.integer[Any]], generator: np.random.Generator) -> Array:
        """Return the mean rate of every resample, the episodes of each drawn seed played anew.

        A seed's chance of success is (k + 1) / (n + 2), Laplace's rule: else 0 of 64 had an interval of no width.
        """
        episodes_S = np.maximum(np.rint(self.episodes_S), 1).astype(np.int64)
        chance_S = np.clip((self.successes_S + 1) / (self.episodes_S + 2), 0, 1)
        played_RS = episodes_S[drawn_RS]
        return np.asarray((generator.binomial(played_RS, chance_S[drawn_RS]) / played_RS).mean(1))


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over seeds and the interval that holds it with probability LEVEL."""

    mean: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0


def success_interval(counts: Counts, seed: int = 0) -> Interval:
    """Return the mean success over seeds."""
    mean, low, high = success_band(counts, seed)
    return Interval(float(mean), float(low), float(high))


def success_band(counts: Counts, seed: int = 0) -> tuple[Array, Array, Array]:
    """Return mean, lower and upper bound over the seeds, for every point of a curve."""
    generator = np.random.default_rng(seed)
    low, high = _bounds(counts.resampled_means(_drawn(counts, generator), generator))
    return counts.rates.mean(0), low, high


def difference_interval(after: Counts, before: Counts, seed: int = 0) -> Interval:
    """Return the mean over seeds of `after - before`; entry for entry both are of the same seed."""
    generator = np.random.default_rng(seed)
    drawn_RS = _drawn(after, generator)
    low, high = _bounds(after.resampled_means(drawn_RS, generator) - before.resampled_means(drawn_RS, generator))
    return Interval(float((after.rates - before.rates).mean()), float(low), float(high))


def _drawn(counts: Counts, generator: np.random.Generator) -> NDArray[np.integer[Any]]:
    """Return the seeds of every resample, drawn with replacement."""
    seeds = len(counts.episodes_S)
    return generator.integers(0, seeds, (RESAMPLES, seeds))


def _bounds(means_R: Array) -> tuple[Array, Array]:
    low, high = np.quantile(means_R, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    return low, high
