import pytest

from horizonrl.common.config.schema import RunConfig
from horizonrl.ops.terminal.figures import clock, duration, mean_success, seconds_left, sparkline, time_left
from tests.ops.runs import LINE


def test_success_over_steps_is_weighted_by_their_episodes() -> None:
    few, many = {"success_rate": 1.0, "episodes": 1}, {"success_rate": 0.0, "episodes": 3}
    assert mean_success([few, many, {"success_rate": None, "episodes": 0}]) == 0.25
    assert mean_success([]) is None


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.4, "0 s"), (80, "80 s"), (600, "10 min"), (9000, "2.5 h"), (260_000, "3.0 d"), (-3, "0 s")],
)
def test_a_time_is_told_in_its_fitting_unit(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


def test_a_clock_shows_hours_only_when_there_are_any() -> None:
    assert (clock(8.9), clock(760), clock(11_110)) == ("0:08", "12:40", "3:05:10")


def test_a_trend_shows_low_and_high_and_never_more_than_its_width() -> None:
    assert sparkline([0.0, 0.5, 1.0], 24, 0.0, 1.0) == "▁▅█"
    assert sparkline([None, 0.5], 24, 0.0, 1.0) == "▅"
    assert sparkline([0, 0, 1, 1], 2) == "▁█"
    assert sparkline([0.3, 0.3], 24) == "▅▅"
    assert len(sparkline(list(range(1000)), 24)) <= 24
    assert sparkline([None], 24) == ""


def test_the_time_left_is_that_of_the_last_steps_and_of_the_present_phase() -> None:
    config = RunConfig.load([], ["--imitation.steps=4", "--rl.steps=10"])
    imitation = [LINE | {"phase": "imitation", "step_s": 1.0, "wait_s": 1.0}] * 3
    assert seconds_left(config, imitation, 3) == 2.0
    assert time_left(config, imitation, 3) == "about 2 s of imitation left"
    assert time_left(config, imitation, 4) == "", "RL's pace is not known yet"
    slow, quick = LINE | {"step_s": 900.0}, LINE | {"step_s": 9.0, "wait_s": 1.0}
    assert time_left(config, [*imitation, slow, *[quick] * 5], 10) == "about 40 s left"
    assert time_left(config, [*imitation, quick], 14) == ""
