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
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError, create_model

from horizonrl.common.errors import ConfigError
from horizonrl.common.quantities import QUANTITIES
from horizonrl.common.run_dir import EPISODE_FILE, EVALS, LEDGER, LINEAGES, METRICS, TESTS
from horizonrl.common.state import HorizonGrowth
from horizonrl.common.types import DropReason, Kind, StopReason
from horizonrl.learner.controller.curriculum import DrawShare

Number = float | None
"""None is what was not measured."""
TicketId = Annotated[str, Field(pattern=rf"^({'|'.join(Kind)})-\d+$")]


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


class Origin(Shape):
    """Where in the run a line belongs. Not every file has each of these."""

    step: int = 0
    version: int = 0
    lineage: int = 0
    time: float = 0.0
    phase: Literal["imitation", "rl"] = "rl"


class EvaluationLine(Origin, Measures):
    phase_step: int = 0
    settled_step: int = 0
    oldest_version: int | None = None
    newest_version: int | None = None
    environments: dict[str, Measures] = {}
    ends: list[tuple[int, TicketId, DropReason | Literal["evaluated", "void"]]] = []
    split: str = ""


class ResultLine(Shape):
    """What `horizonrl eval` came to on test tasks."""

    time: str = ""
    command: str = ""
    split: str = ""
    version: int = 0
    environments: dict[str, dict[str, Number]] = {}


class LedgerLine(Origin):
    cursor: int = 0
    trained: list[tuple[int, TicketId]] = []
    dropped: list[tuple[int, TicketId, DropReason]] = []
    voids: list[tuple[int, TicketId]] = []
    actors: dict[str, str] = {}
    repeats: int = 0
    never_issued: list[int] = []
    data_digest: str = ""
    weights_digest: str = ""


class LineageLine(Origin):
    from_step: int = 0
    changed: dict[str, Any] = {}
    log_cut: dict[str, int] = {}


class TurnLine(Shape):
    text: str = ""
    observation: str = ""
    reward: float = 0.0
    ids: list[int] = []
    logprobs: list[float] = []
    spans: list[tuple[int, int, int]] = []
    versions: list[int] = []
    branch: int = 0
    trained: bool = True


class EpisodeLine(Shape):
    ticket: TicketId = ""
    env: str = ""
    task: str = ""
    horizon: int = 0
    episode: int = 0
    stop: StopReason = StopReason.HORIZON
    success: bool = False
    episode_return: float = Field(0.0, alias="return")
    error: str | None = None
    prompt: str = ""
    refused: int = 0
    refusal: str | None = None
    branches: list[str] = []
    turns: list[TurnLine] = []


_QUANTITIES: Any = dict.fromkeys(QUANTITIES, (Number, None))
StepOutcome = create_model("StepOutcome", __base__=Shape, **_QUANTITIES)
MetricsLine = create_model(
    "MetricsLine",
    __base__=(Origin, StepOutcome),
    horizons=(dict[str, int], {}),
    environments=(dict[str, StepOutcome], {}),
    growths=(list[HorizonGrowth], []),
    curriculum=(list[DrawShare], []),
    numbers=(dict[str, Number], {}),
    durations=(dict[str, list[float]], {}),
)
SHAPES: Mapping[str, type[Shape]] = {
    METRICS: MetricsLine,  # type: ignore[dict-item]
    LEDGER: LedgerLine,
    EVALS: EvaluationLine,
    TESTS: ResultLine,
    LINEAGES: LineageLine,
}


class JournalLine(dict[str, Any]):
    """The object in a line of a run's file. Raises ConfigError with its place for a key that it lacks."""

    position: str

    def __missing__(self, key: str) -> Any:
        raise ConfigError(f"{self.position} has no {key!r}: remove that line")


def read_line(path: Path, number: int, line: bytes) -> dict[str, Any]:
    """Return the object in a line. Raises ConfigError with its place if it holds none, as after a power cut."""
    position = f"{path}, line {number}"
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise ConfigError(f"{position} is not JSON: remove that line") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{position} is not an object: remove that line")
    if shape := EpisodeLine if EPISODE_FILE.fullmatch(path.name) else SHAPES.get(path.name):
        try:
            shape.model_validate_json(line, strict=True)
        except ValidationError as error:
            wrong = error.errors(include_url=False)[0]
            key = ".".join(map(str, wrong["loc"]))
            raise ConfigError(
                f"{position} has {key} = {reprlib.repr(wrong['input'])}: {wrong['msg'].lower()}. Remove that line"
            ) from None
    journal_line = JournalLine(value)
    journal_line.position = position
    return journal_line


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a JSON-lines file, as `GrowingLines` does; nothing if there is no file."""
    return GrowingLines(path).read()


@dataclass
class LineTail:
    """The complete lines of a file that another process appends to, each once."""

    path: Path
    offset: int = 0
    """Bytes that have been read."""
    _inode: int | None = None

    def take(self) -> tuple[list[bytes], bool]:
        """Return the lines that came since the last call, and whether they are the first ones of the file.

        They are at the first call, and after the file was replaced or truncated. Raises FileNotFoundError.
        """
        with self.path.open("rb") as file:
            # Of the open file: between a look at the path and its opening, a learner may have replaced it.
            status = os.fstat(file.fileno())
            # The size alone does not tell: a rewritten file may already be longer than what was read of the old.
            replaced = self._inode not in (None, status.st_ino)
            if replaced or status.st_size < self.offset:
                self.offset = 0
            self._inode, start = status.st_ino, self.offset
            file.seek(start)
            *complete, unfinished = file.read().split(b"\n")
            self.offset = file.tell() - len(unfinished)
        return complete, start == 0


@dataclass
class GrowingLines:
    """A JSON-lines file that is read repeatedly. Lines are kept until a resumed learner rewrites the file."""

    path: Path
    lines: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._tail = LineTail(self.path)

    def read(self) -> list[dict[str, Any]]:
        """Return all complete lines. Raises ConfigError for a damaged one, with its place."""
        offset = self._tail.offset
        try:
            complete, first = self._tail.take()
        except FileNotFoundError:
            return self.lines
        earlier = [] if first else self.lines
        try:
            new = [
                read_line(self.path, number, line)
                for number, line in enumerate(complete, len(earlier) + 1)
            ]
        except ConfigError:
            self._tail.offset = 0 if first else offset  # whoever asks again is told again
            raise
        if first or new:  # a new list: who has the one before sees no line come
            self.lines = [*earlier, *new]
        return self.lines
