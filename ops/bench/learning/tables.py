"""The paper's 27 tasks, played with what a run had after imitation and with what RL made of it.

Place in the flow: a run's training → **its tables**, by `horizonrl eval --table` as child processes → its checkpoints
are removed → `results.json`, `report.md`. Both stay in the run's directory, as `tables/before` and `tables/after`.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from horizonrl.common.config.schema import RunConfig
from horizonrl.common.errors import ConfigError
from horizonrl.common.run_dir import CHECKPOINTS, CONFIG
from horizonrl.learner.records.checkpoint import checkpoint_name
from horizonrl.ops.bench.learning.study import StudyRun, TableFile
from horizonrl.ops.evaluation.report import RESULTS, markdown_table, read_results, success
from horizonrl.ops.observe.figures import number

TABLES = "tables"
"""Folder in a run's directory."""
BEFORE, AFTER = "before", "after"
KEPT_FACTS = ("settings", "samples", "blocks")
"""Of an evaluation's `results.json`; the rest names places on this machine."""


def table_commands(run_dir: Path, config: RunConfig, table: TableFile) -> list[list[str]]:
    """Return the two evaluations of a run. Before RL it is the model as it came if there was no imitation."""
    imitation, checkpoints = config.imitation.steps, run_dir / CHECKPOINTS
    came = [config.model.name, "--recipe", str(run_dir / CONFIG)]
    subjects = {
        BEFORE: [str(checkpoints / checkpoint_name(imitation))] if imitation else came,
        AFTER: [str(checkpoints / checkpoint_name(imitation + config.rl.steps))],
    }
    choice = ["--table", "--tasks", str(table.tasks), "--samples", str(table.samples)]
    program = [sys.executable, "-m", "horizonrl.ops.cli.main", "eval"]
    return [[*program, *named, *choice, "--out", str(run_dir / TABLES / when)] for when, named in subjects.items()]


def tables_missing(run_dir: Path) -> bool:
    """Return whether a table of a run has still to be played, in whole or in part."""
    return not all((run_dir / TABLES / when / RESULTS).is_file() for when in (BEFORE, AFTER))


def read_tables(run_dir: Path) -> dict[str, Any]:
    """Return both tables, or an empty dictionary if they are not complete."""
    if tables_missing(run_dir):
        return {}
    read = {when: read_results(run_dir / TABLES / when) for when in (BEFORE, AFTER)}
    return {when: {name: results[name] for name in KEPT_FACTS} for when, results in read.items()}


def require_kept_checkpoint(run: StudyRun) -> None:
    """Raise ConfigError if the checkpoint that ends imitation is gone when RL ends: both tables are played then."""
    config = run.config
    first, every = config.imitation.steps, config.learner.checkpoint_every
    last = first + config.rl.steps
    # RL writes one at each multiple, and one at its end.
    needed = 1 + -(-last // every) - first // every
    if first and config.learner.keep_checkpoints < needed:
        raise ConfigError(
            f"variant {run.variant.name}: [table] is played with the checkpoint of step {first}, and "
            f"learner.keep_checkpoints is {config.learner.keep_checkpoints}, so that RL removes it: give {needed} or "
            "more, better with one for each interruption, or raise learner.checkpoint_every"
        )


HEAD = ("scenario", "task", "n", "before RL", "after RL", "turns before", "turns after")


def tables_to_markdown(name: str, tables: Mapping[str, Any]) -> str:
    """Return a run's tables side by side, as a section of the report."""
    before, after = (tables[when]["blocks"][0]["rows"] for when in (BEFORE, AFTER))
    rows = [_cells(one, other) for one, other in zip(before, after, strict=True)]
    return f"## The 27 tasks: {name}\n\n{markdown_table(HEAD, rows)}"


def _cells(before: Mapping[str, Any], after: Mapping[str, Any]) -> Sequence[str]:
    both = (before, after)
    return [
        before["scenario"],
        before["task"],
        str(before["episodes"]),
        *map(success, both),
        *(number(row["turns_mean"], 1) for row in both),
    ]
