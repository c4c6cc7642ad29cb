"""A run directory as an object: what it has measured, its episodes, and what can be made of it."""

import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from horizonrl.common.config.arguments import checked
from horizonrl.common.config.schema import RunConfig
from horizonrl.common.run_dir import EVALS, LEDGER, METRICS, REPORT
from horizonrl.ops.api.evaluation import Evaluation, evaluate
from horizonrl.ops.api.rows import Rows
from horizonrl.ops.evaluation.plan import Choice
from horizonrl.ops.publish.dataset import rows as dataset_rows
from horizonrl.ops.publish.rows import EpisodeRow
from horizonrl.ops.rundir.directory import in_training, read_config
from horizonrl.ops.rundir.episodes import EpisodeFiles
from horizonrl.ops.rundir.files import JournalReader
from horizonrl.ops.rundir.lines import GrowingLines, read_lines
from horizonrl.ops.rundir.view import RunView
from horizonrl.ops.terminal.figures import percent

LOOK_S = 0.5
"""Time between two looks at the files of a run that is followed."""


@dataclass(frozen=True, slots=True)
class RunEvent:
    """A step that the learner has taken, or an evaluation that is complete."""

    kind: Literal["step", "evaluation"]
    step: int
    """The step, or the version that was evaluated."""
    total_steps: int
    measures: Mapping[str, Any]
    """The line of `metrics.jsonl` or `evals.jsonl` (docs/operating.md)."""

    @property
    def success_rate(self) -> float | None:
        """The share of solved episodes, from 0 to 1; None if no episode was valid."""
        rate: float | None = self.measures["success_rate"]
        return rate

    def __str__(self) -> str:
        phase = "held-out" if self.kind == "evaluation" else self.measures["phase"]
        return f"{self.kind} {self.step} of {self.total_steps}: {phase}, success {percent(self.success_rate)}"


class Run:
    """A run directory. Its files are read at each call, so a run that goes on may be asked again."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.directory)!r})"

    @cached_property
    def config(self) -> RunConfig:
        """The config that the run was last started with. Raises ConfigError if this is no run directory."""
        return read_config(self.directory)

    @property
    def step(self) -> int:
        """The steps taken so far, which is the version of the weights."""
        return JournalReader(self.directory, ("metrics",)).read().step

    @property
    def finished(self) -> bool:
        """Whether every step has been taken and every evaluation is complete."""
        return self._view().finished

    def gain(self) -> str:
        """Return what training added: `0 % before training, 13 % after imitation, 85 % after RL` on held-out tasks."""
        return self._view().gain

    def stages(self) -> Rows:
        """Return the evaluations before training, after imitation and after RL; `stage` names them."""
        return Rows({"stage": stage.label} | dict(stage.line) for stage in self._view().stages)

    def _view(self) -> RunView:
        return RunView.read(self.directory, self.config)

    def metrics(self) -> Rows:
        """Return a row per step, imitation first (docs/operating.md has the columns)."""
        return Rows(read_lines(self.directory / METRICS))

    def ledger(self) -> Rows:
        """Return a row per step with the tickets that it was made of, and the digests."""
        return Rows(read_lines(self.directory / LEDGER))

    def evaluations(self) -> Rows:
        """Return a row per complete evaluation during training, with 95 % intervals."""
        return Rows(read_lines(self.directory / EVALS))

    def episodes(self, *, held_out: bool = False) -> Iterator[EpisodeRow]:
        """Yield the episodes that are kept, in the order of consumption; a group at a time is in memory.

        With `held_out`, those of the evaluations too (`kind` is `eval`). Warns at the end of lines that were cut short.
        """
        source = EpisodeFiles(self.directory, held_out=held_out)
        yield from dataset_rows(self.config, self.directory, source)
        if source.unreadable:
            warnings.warn(
                f"{source.unreadable} episodes of {self.directory} could not be read whole",
                stacklevel=2,
            )

    def follow(self, after_step: int = 0) -> Iterator[RunEvent]:
        """Yield each step and evaluation as it comes, first those that are there; return when nobody trains any more.

        A step that a crash has rolled back is yielded again when it is taken again.
        """
        metrics, evals = (
            GrowingLines(self.directory / METRICS),
            GrowingLines(self.directory / EVALS),
        )
        steps, judged = list[tuple[int, int]](), set[tuple[int, int]]()
        while True:
            # Before the files are read: what is written between the two looks is read once more.
            lives = self._lives()
            lines, rounds = metrics.read(), evals.read()
            while steps and (len(lines) < len(steps) or _key(lines[len(steps) - 1]) != steps[-1]):
                steps.pop()
            new = [line for line in lines[len(steps) :] if line["step"] > after_step]
            fresh = [
                line
                for line in rounds
                if _key(line) not in judged and line["settled_step"] > after_step
            ]
            steps = [_key(line) for line in lines]
            judged = {_key(line) for line in rounds}
            yield from self._events(new, fresh)
            if not lives:
                return
            self._wait(LOOK_S)

    def _events(self, new: list[dict[str, Any]], fresh: list[dict[str, Any]]) -> Iterator[RunEvent]:
        """Yield steps and evaluations in the order in which they were complete."""
        total, remaining = (
            self.config.total_steps if new or fresh else 0,
            sorted(fresh, key=_settling_step),
        )
        for line in new:
            while remaining and _settling_step(remaining[0]) <= line["step"]:
                yield RunEvent("evaluation", remaining[0]["version"], total, remaining.pop(0))
            yield RunEvent("step", line["step"], total, line)
        for line in remaining:
            yield RunEvent("evaluation", line["version"], total, line)

    def _lives(self) -> bool:
        return in_training(self.directory)

    def _wait(self, seconds: float) -> None:
        time.sleep(seconds)

    def evaluate(
        self,
        out: str | Path,
        choice: Choice | None = None,
        overrides: Mapping[str, Any] | None = None,
    ) -> Evaluation:
        """Play held-out tasks with the run's best version, else its newest, as `horizonrl eval RUN` does."""
        return evaluate(self.directory, out, choice, overrides)

    @checked
    def export(self, out: str | Path, *, best: bool = False) -> Path:
        """Write the newest weights, or the best evaluated ones, as a Hugging Face directory; return it.

        Raises CheckpointError if there are none yet.
        """
        from horizonrl.ops.publish.export import export_run

        export_run(self.directory, Path(out), best=best)
        return Path(out)

    @checked
    def report(self, file: str | Path | None = None) -> Path:
        """Write the run as one HTML page, `report.html` in its directory by default; return the file."""
        from horizonrl.ops.report.page import save_page

        target = Path(file) if file is not None else self.directory / REPORT
        save_page(self.directory, self.config, target)
        return target


@checked
def open_run(directory: str | Path) -> Run:
    """Return a run that is there. Raises ConfigError if the directory is no run's."""
    run = Run(directory)
    _ = run.config
    return run


def _key(line: Mapping[str, Any]) -> tuple[int, int]:
    return int(line["version"]), int(line["lineage"])


def _settling_step(line: Mapping[str, Any]) -> int:
    return int(line["settled_step"])
