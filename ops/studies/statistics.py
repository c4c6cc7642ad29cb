"""Intervals for success over seeds: pure functions of counts, NumPy only (`significance.py` has the tests).

Axes: S seeds, R resamples; `...` stands for any further axes (points of a curve).

Two things vary: how training goes under a seed, and which episodes happened to be played to measure it. Each resample
draws seeds with replacement and then, for each drawn seed, its successes again from a binomial distribution. A sample
of S seeds shows only (S-1)/S of their variance, while the variance of the episodes is counted twice, because the
differences between seeds contain it too. So the variance of the mean is exact if the variance between seeds is S-1
times that of a seed's episodes; it is too large below that ratio and too small above. With a single seed, the interval
covers that seed's episodes only.
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
    """Successes and episodes, with one entry per seed. Both share the further axes of a curve."""

    successes_S: Array
    episodes_S: Array

    @property
    def rates(self) -> Array:
        return self.successes_S / self.episodes_S

    def resample_means(
        self, drawn_RS: NDArray[np.integer[Any]], generator: np.random.Generator
    ) -> Array:
        """Return the mean rate of each resample, with the episodes of each drawn seed drawn again."""
        return np.asarray(self.resample(drawn_RS, generator).mean(1))

    def resample(self, drawn: Any, generator: np.random.Generator) -> Array:
        """Return the rates at the drawn places, with the episodes of each drawn again.

        A seed's chance of success is (k + 1) / (n + 2), by Laplace's rule. With k / n, 0 of 64 would have an interval
        of width 0.
        """
        # Counts at a place between two evaluations are interpolated, and a binomial needs whole ones.
        episodes_S = np.maximum(np.rint(self.episodes_S), 1).astype(np.int64)
        chance_S = np.clip((self.successes_S + 1) / (self.episodes_S + 2), 0, 1)
        played = episodes_S[drawn]
        return np.asarray(generator.binomial(played, chance_S[drawn]) / played)


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over seeds and its bootstrap interval at LEVEL."""

    mean: float
    low: float
    high: float


def success_interval(counts: Counts, seed: int = 0) -> Interval:
    """Return the mean success over seeds."""
    mean, low, high = success_band(counts, seed)
    return Interval(float(mean), float(low), float(high))


def success_band(counts: Counts, seed: int = 0) -> tuple[Array, Array, Array]:
    """Return the mean and its lower and upper bound over the seeds, for every point of a curve."""
    generator = np.random.default_rng(seed)
    low, high = _bounds(counts.resample_means(_draw_seeds(counts, generator), generator))
    return counts.rates.mean(0), low, high


def difference_interval(after: Counts, before: Counts) -> Interval:
    """Return the mean of `after - before` over seeds. The entries of both must belong to the same seeds."""
    generator = np.random.default_rng(0)
    drawn_RS = _draw_seeds(after, generator)
    # The same draws on both sides: the difference is paired by seed, and what a seed adds to both cancels.
    low, high = _bounds(
        after.resample_means(drawn_RS, generator) - before.resample_means(drawn_RS, generator)
    )
    return Interval(float((after.rates - before.rates).mean()), float(low), float(high))


def _draw_seeds(counts: Counts, generator: np.random.Generator) -> NDArray[np.integer[Any]]:
    """Return the seed indices of each resample, drawn with replacement."""
    seeds = len(counts.episodes_S)
    return generator.integers(0, seeds, (RESAMPLES, seeds))


def _bounds(means_R: Array) -> tuple[Array, Array]:
    low, high = np.quantile(means_R, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    return low, high
