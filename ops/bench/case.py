"""A case of a bench: what its sides reach in the same rounds, and the rows of the table that come of it."""

import inspect
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from horizonrl.common.errors import HorizonError, MissingDependency
from horizonrl.ops.models.models import SMOLLM2, resolve_model

ROUNDS, SMALL_ROUNDS = 5, 1
"""Rounds of each case: the median then leaves out the two worst."""
NOBODY = "none"
"""The peer of a row that has none: its ratio is null, and it only informs."""

Side = Callable[[], Awaitable[Mapping[str, float]]]
"""Takes one turn; returns what it reached, by unit."""


@dataclass(frozen=True, slots=True)
class Request:
    """What `horizonrl bench` was asked for."""

    small: bool = False
    """Seconds instead of minutes, with tiny models: shows that a row works, and measures nothing."""
    only: str = ""
    """The one environment to measure, for the rows of environments; empty means all."""
    model: str | None = None
    """The model of the rows that train or sample; None means SmolLM2."""
    scratch: Path = Path()
    """A folder for the group's files, gone afterwards."""
    absent: dict[str, HorizonError] = field(default_factory=dict)
    """What could not be measured, and why."""

    def model_dir(self) -> Path:
        """Return the model's directory; the tiny model of a small bench is made in `scratch`."""
        if not self.small:
            return resolve_model(self.model or SMOLLM2)
        from horizonrl.ops.models.tiny_model import make_tiny_model

        return make_tiny_model(self.scratch / "model")


@dataclass(frozen=True, slots=True)
class Case:
    what: str
    sides: Mapping[str, Side]
    """Ours first, then the peers by name."""
    goals: Mapping[str, float] = field(default_factory=dict)
    """By peer: how many times better ours should be, in the first unit."""
    rounds: int | None = None
    warms_up: bool = False
    """A round before those that count, in which caches fill."""
    swaps: bool = False
    """Every other round begins with the last side, since the second finds what the first has cached."""


Cases = Callable[[Request], AsyncIterator[Case]]
"""Prepares and yields the cases of a group. Raises MissingDependency without what all of them need."""


@dataclass(frozen=True, slots=True)
class Row:
    """What ours and one peer reached in the same rounds."""

    what: str
    peer: str
    unit: str
    ours: Sequence[float]
    theirs: Sequence[float]
    goal: float | None = None
    """The ratio to reach; None where the row only informs."""

    @property
    def ratios(self) -> list[float]:
        """How many times better ours was, by round: of rates the higher, else the lower one."""
        pairs = zip(self.ours, self.theirs, strict=True) if self.theirs else ()
        more_is_better = self.unit.endswith("/s")
        return [ours / theirs if more_is_better else theirs / ours for ours, theirs in pairs]

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


async def measure(case: Case, request: Request) -> list[Row]:
    """Let the sides of a case take turns. A peer that fails is left out; the error of ours is raised."""
    ours, *_ = sides = dict(case.sides)
    rounds = case.rounds or (SMALL_ROUNDS if request.small else ROUNDS)
    reached: dict[str, dict[str, list[float]]] = {}
    for number in range(-int(case.warms_up), rounds):
        for name in list(reversed(sides) if case.swaps and number % 2 else sides):
            try:
                values = await sides[name]()
            except HorizonError as error:
                if name == ours:
                    raise
                request.absent[f"{case.what}: {name}"] = error
                del sides[name]
                continue
            for unit, value in values.items() if number >= 0 else ():
                reached.setdefault(unit, {}).setdefault(name, []).append(value)
    rows = []
    for index, (unit, by_side) in enumerate(reached.items()):
        peers = [name for name in by_side if name in sides and name != ours]
        for peer in peers:
            goal = None if index else case.goals.get(peer)
            rows.append(Row(case.what, peer, unit, by_side[ours], by_side[peer], goal))
        if not peers:
            rows.append(Row(case.what, NOBODY, unit, by_side[ours], ()))
    return rows


def rate(unit: str, count: float, work: Callable[[], Any]) -> Side:
    """Return a side that does `count` pieces of work, or awaits them, and reaches so many per second."""

    async def side() -> Mapping[str, float]:
        started = time.perf_counter()
        result = work()
        if inspect.isawaitable(result):
            await result
        return {unit: count / (time.perf_counter() - started)}

    return side


def constant(unit: str, value: float) -> Side:
    """Return a side that reaches the same in every round, such as a goal that is a number."""

    async def side() -> Mapping[str, float]:
        return {unit: value}

    return side


def require(*packages: str) -> None:
    """Raise MissingDependency for the first package that is not installed."""
    for package in packages:
        if find_spec(package) is None:
            cure = "pip install 'horizonrl[cpu,bench]'"
            raise MissingDependency(f"the package {package!r} is not installed: {cure}")
