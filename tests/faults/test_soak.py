"""The soak's arithmetic."""

import pytest

from tests.faults.soak import Sample, per_hour, summary


def sample(at_s: float, step: int, rss_mb: float) -> Sample:
    return Sample(
        at_s=at_s,
        step=step,
        groups=2 * step,
        rss_mb={"learner": rss_mb},
        descriptors={"learner": 20},
        threads={"learner": 9},
        stream_messages={"GROUPS": step % 50},
        stream_mb={"GROUPS": 0.1 * (step % 50)},
        files_mb={"episodes": 0.01 * step},
    )


def test_the_slope_is_that_of_the_second_half_per_hour() -> None:
    warming_up = [(float(second), 100.0 * second) for second in range(0, 1800, 10)]
    leaking = [(float(second), 500.0 + 2.0 * (second / 3600)) for second in range(1800, 3600, 10)]
    assert per_hour([*warming_up, *leaking]) == pytest.approx(2.0)


def test_a_summary_tells_speeds_extremes_and_slopes() -> None:
    facts = summary(
        [
            sample(second, step=4 * second, rss_mb=300 + second / 3600)
            for second in range(0, 610, 10)
        ]
    )
    assert (facts["minutes"], facts["steps"], facts["steps_per_s"], facts["groups_per_s"]) == (
        10.0,
        2400,
        4.0,
        8.0,
    )
    assert facts["rss_mb"]["learner"]["per_hour"] == pytest.approx(1.0)
    assert facts["stream_messages"]["GROUPS"]["max"] == 40
    assert facts["files_mb"]["episodes"]["per_hour"] == pytest.approx(144.0)


def test_one_sample_has_no_slope() -> None:
    assert summary([sample(0.0, step=3, rss_mb=300.0)])["rss_mb"]["learner"]["per_hour"] == 0.0
