"""The paper's 27 tasks, played with what a run had after imitation and with what RL made of it.

Place in the flow: a run's training → **its tables**, by `horizonrl eval --table` as child processes → its checkpoints
are removed → `results.json`, `report.md`. Both stay in the run's directory, as `tables/before` and `tables/after`.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from horizonrl.common.config.schema import RunConfig
from horizonrl.common.errors import ConfigError
from horizonrl.common.processes import horizonrl_command
from horizonrl.common.run_dir import CHECKPOINTS, CONFIG
from horizonrl.learner.records.checkpoint import checkpoint_name
from horizonrl.ops.evaluation.journal import read_journal
from horizonrl.ops.evaluation.report import RESULTS, read_results
from horizonrl.ops.studies.significance import holm, paired_test
from horizonrl.ops.studies.study import StudyRun, TableFile

TABLES = "tables"
"""Folder in a run's directory."""
BEFORE, AFTER, PAIRED = "before", "after", "paired"
KEPT_FACTS = ("split", "settings", "samples", "blocks")
"""Of an evaluation's `results.json`; the rest names places on this machine."""


def table_commands(
    run_dir: Path, config: RunConfig, table: TableFile, split: str
) -> list[list[str]]:
    """Return the two evaluations of a run. Before RL it is the model as it came if there was no imitation."""
    imitation, checkpoints = config.imitation.steps, run_dir / CHECKPOINTS
    came = [config.model.name, "--recipe", str(run_dir / CONFIG)]
    subjects = {
        BEFORE: [str(checkpoints / checkpoint_name(imitation))] if imitation else came,
        AFTER: [str(checkpoints / checkpoint_name(imitation + config.rl.steps))],
    }
    choice = ["--table", "--split", split]
    choice += ["--tasks", str(table.tasks), "--samples", str(table.samples)]
    return [
        horizonrl_command("eval", *named, *choice, "--out", str(run_dir / TABLES / when))
        for when, named in subjects.items()
    ]


def tables_missing(run_dir: Path) -> bool:
    """Return whether a table of a run has still to be played, in whole or in part."""
    return not all((run_dir / TABLES / when / RESULTS).is_file() for when in (BEFORE, AFTER))


def read_tables(run_dir: Path) -> dict[str, Any]:
    """Return both tables, or an empty dictionary if they are not complete."""
    if tables_missing(run_dir):
        return {}
    read = {when: read_results(run_dir / TABLES / when) for when in (BEFORE, AFTER)}
    kept = {when: {name: results[name] for name in KEPT_FACTS} for when, results in read.items()}
    return {**kept, PAIRED: _test_pairs(run_dir, read[AFTER]["blocks"][0])}


def _test_pairs(run_dir: Path, block: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what RL adds to the success in each scenario, tested over its tasks, with Holm's correction.

    A task's rate counts once, because its episodes resemble each other. What another seed would give, it does not say.
    """
    before, after = (
        _task_rates(run_dir / TABLES / when, block["turns"]) for when in (BEFORE, AFTER)
    )
    rows: list[dict[str, Any]] = []
    for env_id, scenario in {row["env"]: row["scenario"] for row in block["rows"]}.items():
        tasks = sorted(task for task in before.keys() & after.keys() if task[0] == env_id)
        before_T, after_T = (np.array([rates[task] for task in tasks]) for rates in (before, after))
        difference = float(np.mean(after_T - before_T)) if tasks else None
        test = paired_test(after_T, before_T)
        tested = asdict(test) if test is not None else None
        rows.append(
            {
                "scenario": scenario,
                "tasks": len(tasks),
                "difference": difference,
                "tested": tested,
                "p": None,
            }
        )
    rows_known = [row for row in rows if row["tested"] is not None]
    for row, corrected in zip(
        rows_known, holm([row["tested"]["p"] for row in rows_known]), strict=True
    ):
        row["p"] = corrected
    return rows


def _task_rates(directory: Path, turns: Mapping[str, int]) -> dict[tuple[str, str], float]:
    """Return the success of each task, by environment and task, over its episodes that did not break."""
    successes: dict[tuple[str, str], list[bool]] = defaultdict(list)
    for (env_id, task, _), line in read_journal(directory)[1].items():
        if (played := line.within(turns[env_id])) is not None:
            successes[env_id, task].append(played.success)
    return {key: float(np.mean(values)) for key, values in successes.items()}


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
