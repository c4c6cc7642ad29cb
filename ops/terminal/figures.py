"""Numbers as a person reads them in a terminal, and the few that a journal's lines come to. Pure functions."""

from collections.abc import Mapping, Sequence
from typing import Any

from horizonrl.common.config.schema import RunConfig
from horizonrl.common.statistics import mean

Line = Mapping[str, Any]
BLOCKS = "▁▂▃▄▅▆▇█"
RECENT = 5
"""Steps that are taken together, so that a number does not jump."""
MINUTE, HOUR, DAY = 60, 3600, 86400


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def interval(line: Line) -> str:
    """Return an evaluation's success and its interval of 95 %."""
    return f"{percent(line['success_rate'])} ({100 * line['low']:.0f}-{100 * line['high']:.0f} %)"


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


def sparkline(values: Sequence[float | None], width: int, low: float | None = None, high: float | None = None) -> str:
    """Return values as at most `width` blocks, each the mean of its share of them; `low` and `high` are its ends."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    size = -(-len(known) // width)
    means = [sum(part) / len(part) for part in (known[start : start + size] for start in range(0, len(known), size))]
    low, high = min(means) if low is None else low, max(means) if high is None else high
    if high <= low:
        return BLOCKS[len(BLOCKS) // 2] * len(means)
    return "".join(BLOCKS[min(len(BLOCKS) - 1, int((value - low) / (high - low) * len(BLOCKS)))] for value in means)


def mean_success(lines: Sequence[Line]) -> float | None:
    """Return the success of several steps, each weighted by its episodes."""
    known = [line for line in lines if line["success_rate"] is not None]
    episodes = sum(line["episodes"] for line in known)
    return sum(line["success_rate"] * line["episodes"] for line in known) / episodes if episodes else None


def seconds_left(config: RunConfig, lines: Sequence[Line], step: int) -> float | None:
    """Return the time to the end of the present phase, at the pace of its last steps; None before it has had one.

    Of their own times, not of the clock: a run may have stood still between two of them.
    """
    phase, done = config.phase(step)
    paces = [line["step_s"] + line["wait_s"] for line in lines if line["phase"] == phase.value][-RECENT:]
    pace = mean(paces)
    steps = config.imitation.steps if phase.value == "imitation" else config.rl.steps
    return None if pace is None else pace * (steps - done)


def time_left(config: RunConfig, lines: Sequence[Line], step: int) -> str:
    """Say how long it takes from here: to the end of imitation while that lasts, because RL's pace is not known yet."""
    seconds = seconds_left(config, lines, step)
    if seconds is None or step >= config.total_steps:
        return ""
    imitating = config.phase(step)[0].value == "imitation" and config.rl.steps > 0
    return f"about {duration(seconds)} {'of imitation ' if imitating else ''}left"
