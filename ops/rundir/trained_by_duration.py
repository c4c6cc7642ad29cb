"""Are groups that take long trained as often as quick ones? What is refused because it came late is not.

The unit is a tenth of a run's train groups, by the time that they took their actors. Tasks that take long may well be
the hard ones, and a rule that favours the quick ones teaches only those.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

from horizonrl.common.types import TRAINED, DropReason
from horizonrl.ops.terminal.figures import Line, number, percent

TENTHS = 10
FEWEST = 5
"""Groups of a tenth below which nothing is said about it."""


@dataclass(frozen=True, slots=True)
class Tenth:
    """A tenth of the train groups, by duration."""

    low_s: float
    high_s: float
    trained: int = 0
    alike: int = 0
    """Dropped because their episodes earned the same."""
    refused: int = 0
    """Dropped for any other reason: what they hold was not looked at."""

    @property
    def share(self) -> float | None:
        """The share of the groups with something to teach that was trained."""
        return self.trained / (self.trained + self.refused) if self.trained + self.refused else None


def tenths(lines: Sequence[Line]) -> list[Tenth]:
    """Return the tenths of what the steps consumed, the quickest first; nothing for fewer groups than tenths."""
    taken = [
        (duration_s, end)
        for line in lines
        for end, durations in line.get("durations", {}).items()
        for duration_s in durations
    ]
    taken.sort(key=itemgetter(0))
    if len(taken) < TENTHS:
        return []
    bounds = [len(taken) * index // TENTHS for index in range(TENTHS + 1)]
    return [_tenth(taken[bounds[index] : bounds[index + 1]]) for index in range(TENTHS)]


def _tenth(taken: Sequence[tuple[float, str]]) -> Tenth:
    trained = sum(end == TRAINED for _, end in taken)
    alike = sum(end == DropReason.ZERO_VARIANCE for _, end in taken)
    return Tenth(taken[0][0], taken[-1][0], trained, alike, len(taken) - trained - alike)


def warning(lines: Sequence[Line]) -> str | None:
    """Say that the slowest tenth is trained less than half as often as the rest; None if it is not."""
    shares = tenths(lines)
    if not shares:
        return None
    slowest, rest = shares[-1], shares[:-1]
    trained, refused = sum(one.trained for one in rest), sum(one.refused for one in rest)
    if slowest.share is None or slowest.trained + slowest.refused < FEWEST or not trained:
        return None
    usual = trained / (trained + refused)
    if slowest.share >= usual / 2:
        return None
    return (
        f"of the slowest tenth of groups (over {number(slowest.low_s, 1)} s) {percent(slowest.share)} are trained, of "
        f'the others {percent(usual)}: see "Drop rate high" in docs/runbook.md'
    )
