"""The lines of a run's files: complete ones only, and each as docs/operating.md describes it.

A file may have been cut by a power failure or edited by hand. Whoever reads it gets a ConfigError with the place, and
need not look at types.
"""

import json
import os
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError, create_model

from horizonrl.common.errors import ConfigError
from horizonrl.common.quantities import QUANTITIES
from horizonrl.common.run_dir import EVALS, LEDGER, LINEAGES, METRICS
from horizonrl.common.state import HorizonGrowth
from horizonrl.learner.controller.curriculum import DrawShare

Number = float | None
"""None is what was not measured."""


class Shape(BaseModel):
    """What the values of a line must be. Any may be missing, and a value of a later version may be anything."""


class Successes(Shape):
    episodes: int = 0
    successes: int = 0
    success_rate: Number = None
    low: Number = None
    high: Number = None


class Measures(Successes):
    broken: int = 0
    dropped: int = 0
    return_mean: Number = None
    turns_mean: Number = None
    tokens_mean: Number = None
    truncated_share: Number = None
    pass_at: dict[str, Number] = {}
    categories: dict[str, Successes] = {}


class Place(Shape):
    """Where in the run a line belongs. Not every file has each of these."""

    step: int = 0
    version: int = 0
    lineage: int = 0
    time: float = 0.0
    phase: Literal["imitation", "rl"] = "rl"


class EvaluationLine(Place, Measures):
    phase_step: int = 0
    settled_step: int = 0
    oldest_version: int | None = None
    newest_version: int | None = None
    environments: dict[str, Measures] = {}
    ends: list[tuple[int, str, str]] = []


class LedgerLine(Place):
    cursor: int = 0
    trained: list[tuple[int, str]] = []
    dropped: list[tuple[int, str, str]] = []
    voids: list[tuple[int, str]] = []
    actors: dict[str, str] = {}
    repeats: int = 0
    never_issued: list[int] = []
    data_digest: str = ""
    weights_digest: str = ""


class LineageLine(Place):
    from_step: int = 0
    changed: dict[str, Any] = {}
    log_cut: dict[str, int] = {}


_QUANTITIES: Any = dict.fromkeys(QUANTITIES, (Number, None))
StepOutcome = create_model("StepOutcome", __base__=Shape, **_QUANTITIES)
MetricsLine = create_model(
    "MetricsLine",
    __base__=(Place, StepOutcome),
    horizons=(dict[str, int], {}),
    environments=(dict[str, StepOutcome], {}),
    growths=(list[HorizonGrowth], []),
    curriculum=(list[DrawShare], []),
    durations=(dict[str, list[float]], {}),
)
SHAPES: Mapping[str, type[Shape]] = {
    METRICS: MetricsLine,  # type: ignore[dict-item]
    LEDGER: LedgerLine,
    EVALS: EvaluationLine,
    LINEAGES: LineageLine,
}


class JournalLine(dict[str, Any]):
    """The object in a line of a run's file. Raises ConfigError with its place for a key that it lacks."""

    place: str

    def __missing__(self, key: str) -> Any:
        raise ConfigError(f"{self.place} has no {key!r}: remove that line")


def read_line(path: Path, number: int, line: bytes) -> dict[str, Any]:
    """Return the object in a line. Raises ConfigError with its place if it holds none, as after a power cut."""
    place = f"{path}, line {number}"
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise ConfigError(f"{place} is not JSON: remove that line") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{place} is no object: remove that line")
    if path.name in SHAPES:
        try:
            SHAPES[path.name].model_validate_json(line, strict=True)
        except ValidationError as error:
            wrong = error.errors(include_url=False)[0]
            key = ".".join(map(str, wrong["loc"]))
            raise ConfigError(
                f"{place} has {key} = {reprlib.repr(wrong['input'])}: {wrong['msg'].lower()}. Remove that line"
            ) from None
    read = JournalLine(value)
    read.place = place
    return read


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a JSON-lines file; an unfinished last one is left out.

    Raises ConfigError for a damaged one, with its place.
    """
    if not path.exists():
        return []
    return [read_line(path, number, line) for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1)]


@dataclass
class GrowingLines:
    """A JSON-lines file that is read repeatedly. Lines are kept until a resumed learner rewrites the file."""

    path: Path
    lines: list[dict[str, Any]] = field(default_factory=list)
    _inode: int = 0
    _read: int = 0

    def read(self) -> list[dict[str, Any]]:
        """Return all complete lines. Raises ConfigError for a damaged one, with its place."""
        try:
            with self.path.open("rb") as file:
                # Of the open file: between a look at the path and its opening, a learner may have replaced it.
                found = os.fstat(file.fileno())
                # The size alone does not tell: a rewritten file may already be longer than what was read of the old.
                if found.st_ino != self._inode or found.st_size < self._read:
                    self.lines, self._inode, self._read = [], found.st_ino, 0
                file.seek(self._read)
                *complete, unfinished = file.read().split(b"\n")
                end = file.tell() - len(unfinished)
        except FileNotFoundError:
            return self.lines
        self.lines += [read_line(self.path, number, line) for number, line in enumerate(complete, len(self.lines) + 1)]
        self._read = end
        return self.lines
