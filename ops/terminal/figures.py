"""Numbers as a person reads them in a terminal. Pure functions."""

from collections.abc import Mapping, Sequence
from typing import Any

Line = Mapping[str, Any]
BLOCKS = "▁▂▃▄▅▆▇█"
MINUTE, HOUR, DAY = 60, 3600, 86400


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def count_noun(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def interval(line: Line) -> str:
    """Return an evaluation's success and its interval of 95 %."""
    return f"{percent(line['success_rate'])} ({100 * line['low']:.0f}-{100 * line['high']:.0f} %)"


def mean_return(line: Line) -> str:
    """Return an evaluation's mean return as `return 0.53`; empty where it is the share of solved episodes."""
    value = line.get("return_mean")
    return "" if value in (None, line["success_rate"]) else f"return {number(value)}"


def duration(seconds: float) -> str:
    """Return a time in its fitting unit: 8 s, 12 min, 3.5 h, 2.1 d."""
    if seconds < 1.5 * MINUTE:
        return f"{max(0.0, seconds):.0f} s"
    if seconds < 1.5 * HOUR:
        return f"{seconds / MINUTE:.0f} min"
    return f"{seconds / HOUR:.1f} h" if seconds < 2 * DAY else f"{seconds / DAY:.1f} d"


def clock(seconds: float) -> str:
    """Return a time that runs: 0:08, 12:40, 3:05:10."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def sparkline(
    values: Sequence[float | None], width: int, low: float | None = None, high: float | None = None
) -> str:
    """Return values as at most `width` blocks, each the mean of its share of them; `low` and `high` are its ends."""
    numbers = [value for value in values if value is not None]
    if not numbers:
        return ""
    size = -(-len(numbers) // width)
    parts = (numbers[start : start + size] for start in range(0, len(numbers), size))
    means = [sum(part) / len(part) for part in parts]
    low, high = min(means) if low is None else low, max(means) if high is None else high
    if high <= low:
        return BLOCKS[len(BLOCKS) // 2] * len(means)
    return "".join(
        BLOCKS[min(len(BLOCKS) - 1, int((value - low) / (high - low) * len(BLOCKS)))]
        for value in means
    )
