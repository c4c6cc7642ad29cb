"""The journal of a run directory: its lines, and what follows from them alone."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from horizonrl.common.run_dir import EVALS, LEDGER, LINEAGES, METRICS, TESTS
from horizonrl.common.types import TRAINED, Kind, Phase
from horizonrl.ops.rundir.lines import GrowingLines
from horizonrl.ops.terminal.figures import count_noun, mean_return, percent

Line = Mapping[str, Any]
JOURNAL = {
    "metrics": METRICS,
    "ledger": LEDGER,
    "evals": EVALS,
    "lineages": LINEAGES,
    "tests": TESTS,
}
"""The file of each part of `Files`."""
SETTLED = (TRAINED, "evaluated", "void")
"""The ends of a ticket that are not reasons for a drop."""
RECENT = 5
"""Steps that are taken together, so that a number does not jump."""


class TicketEnd(NamedTuple):
    """What became of a ticket."""

    ticket: str
    how: str
    """`trained`, `evaluated`, `void`, or the reason why its group was dropped."""
    sequence: int
    """Of its entry in the group log."""
    step: int
    """The step in whose making it ended."""
    version: int
    """The version that it was trained into; for a held-out ticket, the version that was evaluated."""
    lineage: int
    held_out: bool = False

    def __str__(self) -> str:
        if self.held_out:
            return f"evaluation of version {self.version}"
        if self.how == TRAINED:
            return f"trained into version {self.version}"
        return self.how if self.how in SETTLED else f"dropped: {self.how}"


class TrainingMeans(NamedTuple):
    """Success or reward in training, over the first and the last RL steps, each step weighted by its episodes."""

    steps: int
    """How many steps each of the two numbers is of."""
    first: float | None
    last: float | None


class Stage(NamedTuple):
    """Held-out success at a turning point of a run: what imitation and RL have added."""

    key: str
    """`before_training`, `after_imitation` or `after_rl`."""
    label: str
    line: Line
    """Of `evals.jsonl`."""

    def __str__(self) -> str:
        earned = mean_return(self.line)
        success = percent(self.line["success_rate"])
        return f"{success} ({earned}) {self.label}" if earned else f"{success} {self.label}"


@dataclass(frozen=True)
class Files:
    """The journal of a run directory, read."""

    metrics: Sequence[Line] = ()
    ledger: Sequence[Line] = ()
    evals: Sequence[Line] = ()
    lineages: Sequence[Line] = ()
    tests: Sequence[Line] = ()

    @classmethod
    def read(cls, run_dir: Path) -> "Files":
        return JournalReader(run_dir).read()

    @property
    def step(self) -> int:
        """The last step that has metrics."""
        return int(self.metrics[-1]["step"]) if self.metrics else 0

    @property
    def rl(self) -> list[Line]:
        return [line for line in self.metrics if line["phase"] == Phase.RL.value]

    @property
    def imitation(self) -> list[Line]:
        return [line for line in self.metrics if line["phase"] == Phase.IMITATION.value]

    @property
    def imitation_steps(self) -> int:
        """The last step of imitation so far."""
        return max((line["step"] for line in self.imitation), default=0)

    @property
    def success(self) -> TrainingMeans:
        return self._means("success_rate")

    @property
    def reward(self) -> TrainingMeans:
        return self._means("reward_mean")

    def _means(self, key: str) -> TrainingMeans:
        lines = self.rl
        first, last = _mean(lines[:RECENT], key), _mean(lines[-RECENT:], key)
        return TrainingMeans(min(RECENT, len(lines)), first, last)

    def stages(self, total_steps: int | None) -> list[Stage]:
        """Return the last evaluation before training, the last one of imitation, and the last one of RL."""
        judged = (
            self.stage(line, total_steps) for line in self.evals if line["success_rate"] is not None
        )
        last = {stage.key: stage for stage in judged}
        return sorted(last.values(), key=lambda stage: int(stage.line["version"]))

    def stage(self, line: Line, total_steps: int | None) -> Stage:
        """Return the stage of the run that an evaluation judges."""
        version, boundary = line["version"], self.imitation_steps
        if version > boundary:
            is_end = total_steps is not None and version >= total_steps
            return Stage(
                "after_rl",
                "after RL" if is_end else f"after {count_noun(version - boundary, 'RL step')}",
                line,
            )
        if version:
            return Stage("after_imitation", "after imitation", line)
        return Stage("before_training", "before training", line)

    def ends(self) -> Iterator[TicketEnd]:
        """Yield the end of each ticket that steps and evaluations have settled."""
        for line in self.ledger:
            yield from step_ends(line)
        for line in self.evals:
            for sequence, ticket, how in line["ends"]:
                yield TicketEnd(
                    ticket,
                    how,
                    sequence,
                    line["settled_step"],
                    line["version"],
                    line["lineage"],
                    held_out=True,
                )

    def end_counts(self) -> dict[Kind, Counter[str]]:
        """Return how many tickets of each kind ended in which way."""
        counts: dict[Kind, Counter[str]] = {kind: Counter() for kind in Kind}
        for end in self.ends():
            counts[Kind(end.ticket.partition("-")[0])][end.how] += 1
        return counts


def evaluated_split(line: Line) -> str:
    """Return the split that an evaluation of the run played: `test` if its release knew no other."""
    return str(line.get("split", "test"))


def step_ends(line: Line) -> Iterator[TicketEnd]:
    """Yield the ends in a step's line of the ledger: the trained tickets first, then the dropped, then the void."""
    origin = line["step"], line["version"], line["lineage"]
    ends = [(sequence, ticket, TRAINED) for sequence, ticket in line["trained"]]
    ends += line["dropped"]
    ends += [(sequence, ticket, "void") for sequence, ticket in line["voids"]]
    for sequence, ticket, how in ends:
        yield TicketEnd(ticket, how, sequence, *origin)


class JournalReader:
    """Reads a run's journal repeatedly: each time only the lines that are new."""

    def __init__(self, run_dir: Path, parts: Sequence[str] = tuple(JOURNAL)) -> None:
        self._lines = {part: GrowingLines(run_dir / JOURNAL[part]) for part in parts}

    def read(self) -> Files:
        """Return the journal as it now is. Raises ConfigError for a damaged line, with its place."""
        return Files(**{part: lines.read() for part, lines in self._lines.items()})


def _mean(lines: Sequence[Line], key: str) -> float | None:
    """Return the mean of several steps' success or reward, each weighted by its episodes."""
    measured = [line for line in lines if line[key] is not None]
    episodes = sum(line["episodes"] for line in measured)
    if not episodes:
        return None
    return float(sum(line[key] * line["episodes"] for line in measured) / episodes)
