"""Evaluations from a program: `horizonrl eval` in a process of its own, and its directory as an object."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from horizonrl.common.config.arguments import checked
from horizonrl.ops.api.configs import words
from horizonrl.ops.api.programs import RunningCommand
from horizonrl.ops.api.rows import Rows
from horizonrl.ops.evaluation.journal import Line, read_journal
from horizonrl.ops.evaluation.plan import Choice
from horizonrl.ops.evaluation.report import read_results

OUTPUT = "output.txt"
"""What `horizonrl eval` prints, in the evaluation's directory."""


class Evaluation:
    """The directory of an evaluation."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.directory)!r})"

    @property
    def results(self) -> dict[str, Any]:
        """All of `results.json`: the model, the settings, and a block per turn limit."""
        return read_results(self.directory)

    def rows(self, block: int = 0) -> Rows:
        """Return the table of one turn limit (the first by default): success with its 95 % interval, by task."""
        return Rows(self.results["blocks"][block]["rows"])

    def episodes(self) -> Iterator[Line]:
        """Yield every episode with its turns, in the order in which they ended."""
        yield from read_journal(self.directory)[1].values()


@checked
def open_evaluation(directory: str | Path) -> Evaluation:
    """Return an evaluation that is there. Raises ConfigError if the directory is no complete evaluation's."""
    evaluation = Evaluation(directory)
    _ = evaluation.results
    return evaluation


@checked
def evaluate(
    model: str | Path,
    out: str | Path,
    choice: Choice | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Evaluation:
    """Play held-out tasks with a model and return the results, which are in the directory `out`.

    `model` is a Hugging Face directory, a run directory, a checkpoint or a known name; `choice` says what is played
    (a run's own environments by default); `overrides` has keys of the config, such as `"eval.temperature"`. An
    evaluation in `out` is resumed. Raises ConfigError or RunFailed with the command's message.
    """
    directory = Path(out)
    program = RunningCommand.start(
        [
            "eval",
            str(model),
            "--out",
            str(directory),
            *_choice(choice or Choice()),
            *words(overrides or {}),
        ],
        directory / OUTPUT,
    )
    try:
        program.wait()
    finally:
        program.stop()
    return open_evaluation(directory)


def _choice(choice: Choice) -> Iterator[str]:
    """Yield a choice as the words of `horizonrl eval`."""
    yield from ("--split", choice.split)
    if choice.table:
        yield "--table"
    if choice.tasks is not None:
        yield from ("--tasks", str(choice.tasks))
    lists = {"--env": choice.env_ids, "--categories": choice.categories}
    for flag, values in {**lists, "--samples": choice.samples, "--turns": choice.turns}.items():
        if values:
            yield from (flag, *map(str, values))
    yield from (
        f"--options.{key}={json.dumps(value, default=str)}" for key, value in choice.options.items()
    )
