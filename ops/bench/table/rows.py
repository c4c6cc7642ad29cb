"""A row of the performance table: one measurement of ours, beside one of a peer."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil

ROUNDS = 5
"""Rounds of each row: the median then leaves out the two worst."""
SMALL_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class Row:
    """What both sides reached in the same rounds."""

    what: str
    peer: str
    unit: str
    ours: Sequence[float]
    theirs: Sequence[float]
    goal: float | None = None
    """The ratio to reach; None where the row only informs."""
    less_is_better: bool = False
    """For seconds and bytes; the ratio still tells how many times better ours is."""

    @property
    def ratios(self) -> list[float]:
        """How many times better ours was, by round."""
        pairs = zip(self.ours, self.theirs, strict=True)
        return [theirs / ours if self.less_is_better else ours / theirs for ours, theirs in pairs]

    @property
    def facts(self) -> dict[str, Any]:
        """The row as it stands in the JSON file."""
        ratios = self.ratios
        return {
            "what": self.what,
            "peer": self.peer,
            "ratio": statistics.median(ratios),
            "low": min(ratios),
            "high": max(ratios),
            "goal": self.goal,
            "ours": statistics.median(self.ours),
            "theirs": statistics.median(self.theirs),
            "unit": self.unit,
            "rounds": len(ratios),
        }


def against_limit(what: str, unit: str, values: Sequence[float], limit: float) -> Row:
    """Return a row without a peer: the goal is a number of seconds or bytes that ours should stay below."""
    return Row(what, f"goal of {limit:g} {unit}", unit, values, [limit] * len(values), 1.0, less_is_better=True)


def rounds(small: bool) -> int:
    return SMALL_ROUNDS if small else ROUNDS


def resident_mib(pid: int) -> float:
    """Return the memory of a process and its children, with what they share counted once, in MiB."""
    process = psutil.Process(pid)
    family = [process, *process.children(recursive=True)]
    return sum(float(member.memory_full_info().pss) for member in family) / 2**20
