"""A row of the performance table: one measurement of ours, beside one of a peer."""

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

ROUNDS = 5
"""Rounds of each row: the median then leaves out the two worst."""
SMALL_ROUNDS = 2
NOBODY = "none"
"""The peer of a row that has none: its ratio is null, and it only informs."""


@dataclass(frozen=True, slots=True)
class Request:
    """What `bench speed` was asked for."""

    small: bool = False
    """Seconds instead of minutes, with tiny models: shows that every row works, and measures nothing."""
    agentgym: Path | None = None
    """A checkout of AgentGym, whose servers are then measured too."""
    agentgym_python: str = sys.executable
    """A Python with the dependencies of AgentGym's servers."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Peers that are not there, with what would bring them: their rows are missing."""

    @property
    def rounds(self) -> int:
        return SMALL_ROUNDS if self.small else ROUNDS


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
        pairs = zip(self.ours, self.theirs, strict=True) if self.theirs else ()
        return [theirs / ours if self.less_is_better else ours / theirs for ours, theirs in pairs]

    @property
    def facts(self) -> dict[str, Any]:
        """The row as it stands in the JSON file."""
        ratios = self.ratios
        return {
            "what": self.what,
            "peer": self.peer,
            "ratio": statistics.median(ratios) if ratios else None,
            "low": min(ratios, default=None),
            "high": max(ratios, default=None),
            "goal": self.goal,
            "ours": statistics.median(self.ours),
            "theirs": statistics.median(self.theirs) if self.theirs else None,
            "unit": self.unit,
            "rounds": len(self.ours),
        }


def against_limit(what: str, unit: str, values: Sequence[float], limit: float, *, less_is_better: bool = True) -> Row:
    """Return a row whose peer is a number that was set as the goal."""
    return Row(what, f"goal of {limit:g} {unit}", unit, values, [limit] * len(values), 1.0, less_is_better)


def resident_mib(pid: int) -> float:
    """Return the memory of a process and its children, with what they share counted once, in MiB."""
    process = psutil.Process(pid)
    family = [process, *process.children(recursive=True)]
    return sum(float(member.memory_full_info().pss) for member in family) / 2**20
