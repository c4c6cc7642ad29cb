import pytest

from horizonrl.ops.terminal.figures import clock, duration, sparkline


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
