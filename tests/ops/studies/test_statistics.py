"""Intervals against closed forms."""

import numpy as np
import pytest

from horizonrl.ops.studies.statistics import (
    Counts,
    difference_interval,
    success_band,
    success_interval,
)

Z = 1.959964


def counts(successes: list[float], episodes: list[float]) -> Counts:
    return Counts(np.array(successes), np.array(episodes))


def test_the_interval_of_one_seed_is_the_binomial_one() -> None:
    interval = success_interval(counts([400], [1000]))
    half = Z * np.sqrt(0.4 * 0.6 / 1000)
    assert interval.mean == pytest.approx(0.4)
    assert (interval.low, interval.high) == (
        pytest.approx(0.4 - half, abs=3e-3),
        pytest.approx(0.4 + half, abs=3e-3),
    )


def test_episodes_of_several_equal_seeds_count_together() -> None:
    interval = success_interval(counts([200] * 5, [500] * 5))
    assert interval.high - interval.low == pytest.approx(
        2 * Z * np.sqrt(0.4 * 0.6 / 2500), rel=0.06
    )


def test_seeds_that_differ_widen_the_interval_by_their_bootstrap_variance() -> None:
    rates = np.linspace(0.3, 0.7, 20)
    episodes = 100_000  # so many that only the seeds vary
    interval = success_interval(Counts(rates * episodes, np.full(20, float(episodes))))
    half = Z * rates.std() / np.sqrt(20)  # std with 1/S: what resampling S values has
    assert (interval.low, interval.high) == (
        pytest.approx(0.5 - half, abs=6e-3),
        pytest.approx(0.5 + half, abs=6e-3),
    )


@pytest.mark.parametrize(("successes", "wilson"), [(0, (0.0, 0.0566)), (64, (0.9434, 1.0))])
def test_a_seed_that_never_or_always_succeeds_has_an_interval_of_wilsons_width(
    successes: int, wilson: tuple[float, float]
) -> None:
    interval = success_interval(counts([successes], [64]))
    assert (interval.low, interval.high) == pytest.approx(wilson, abs=0.02)
    assert interval.high - interval.low > 0.02


def test_pairs_of_a_seed_cancel_what_the_seed_brings() -> None:
    seeds = np.array([0.1, 0.5, 0.9])
    episodes = np.full(3, 10_000.0)
    paired = difference_interval(
        Counts((seeds + 0.05) * episodes, episodes), Counts(seeds * episodes, episodes)
    )
    assert paired.mean == pytest.approx(0.05)
    assert paired.low > 0
    shuffled = difference_interval(
        Counts((seeds + 0.05) * episodes, episodes), Counts(seeds[[1, 2, 0]] * episodes, episodes)
    )
    assert shuffled.mean == pytest.approx(0.05)
    assert shuffled.low < 0


def test_a_difference_of_one_seed_has_the_variance_of_both() -> None:
    interval = difference_interval(counts([600], [1000]), counts([500], [1000]))
    half = Z * np.sqrt((0.24 + 0.25) / 1000)
    assert (interval.low, interval.high) == (
        pytest.approx(0.1 - half, abs=4e-3),
        pytest.approx(0.1 + half, abs=4e-3),
    )


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    generator = np.random.default_rng(1)
    drawn = generator.binomial(50, 0.3, size=(200, 3)).astype(float)
    episodes = np.full(3, 50.0)
    held = [
        interval.low <= 0.3 <= interval.high
        for interval in (
            success_interval(Counts(one, episodes), seed) for seed, one in enumerate(drawn)
        )
    ]
    assert np.mean(held) > 0.93  # here the episodes' variance counts twice: on the safe side


def test_a_band_is_the_interval_of_every_point() -> None:
    mean, low, high = success_band(
        Counts(np.array([[10.0, 90.0], [20.0, 80.0]]), np.full((2, 2), 100.0))
    )
    assert mean == pytest.approx([0.15, 0.85])
    for point, (k_1, k_2) in enumerate(((10, 20), (90, 80))):
        alone = success_interval(counts([k_1, k_2], [100, 100]))
        assert (low[point], high[point]) == (
            pytest.approx(alone.low, abs=0.01),
            pytest.approx(alone.high, abs=0.01),
        )


def test_the_same_counts_give_the_same_interval() -> None:
    assert success_interval(counts([3, 9], [20, 20])) == success_interval(counts([3, 9], [20, 20]))
