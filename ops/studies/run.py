"""`horizonrl study learning`: train every variant of a study under every seed, one after another, and compare them.

Place in the flow: study → **runs as child processes** → outcomes → report. The directory remembers the study's state: a
run whose `ending.json` has code 0 is not repeated, and one that was interrupted or failed resumes from its checkpoint,
as `train` does. A run's `recipe.toml` is its complete config, so `horizonrl train` on it repeats the run.
"""

import importlib.util
import json
import re
import shlex
import shutil
import signal
import subprocess
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from horizonrl.common.config.changes import config_changes
from horizonrl.common.config.schema import RunConfig
from horizonrl.common.errors import ConfigError, MissingDependency, NothingToLearn
from horizonrl.common.logs import last_lines
from horizonrl.common.processes import detached, horizonrl_command
from horizonrl.learner.controller.curriculum import eval_tasks
from horizonrl.ops.bench.origin import commit_of_program, describe_machine
from horizonrl.ops.rundir.directory import to_toml
from horizonrl.ops.studies.comparison import ReportedRun, bands, compare, plot_name, to_json
from horizonrl.ops.studies.outcome import AXES, RunOutcome, read_outcome
from horizonrl.ops.studies.report import ReportOptions, results_to_markdown, tables_to_markdown
from horizonrl.ops.studies.study import (
    Study,
    StudyRun,
    TableFile,
    plan,
    read_study,
    select,
    training_config,
)
from horizonrl.ops.studies.tables import (
    TABLES,
    require_kept_checkpoint,
    table_commands,
    tables_missing,
)

RECIPE = "recipe.toml"
ENDING = "ending.json"
LOG = Path("logs") / "train.log"
KEPT_FOLDERS = ("logs", "episodes", TABLES)
"""Kept of a finished run. Checkpoints, weights, the broker's files and the exported model are most of its size."""
INTERRUPTED = 130
ABSENT = object()
"""In place of a setting that a config does not have."""

Command = Callable[[Path], Sequence[str]]


@dataclass(frozen=True, slots=True)
class StudyRequest:
    """The command line of a study."""

    file: Path
    directory: Path
    seeds: Sequence[int] = ()
    """The seeds to run; empty means all of the study's."""
    only: Sequence[str] = ()
    """Names, values of an axis or shell patterns of the variants to run; empty means all, or all of the phase."""
    phase: str | None = None
    """The phase of the study to run; None runs its own seeds and variants."""
    report_only: bool = False
    overrides: Sequence[str] = ()

    def __str__(self) -> str:
        """Return the command as the results record it: with DIR for the directory, which is this machine's own."""
        words = ["horizonrl", "study", "learning", str(self.file), "--directory", "DIR"]
        words += ["--phase", self.phase] if self.phase else []
        words += ["--seeds", ",".join(map(str, self.seeds))] if self.seeds else []
        words += ["--only", *self.only] if self.only else []
        return shlex.join([*words, *self.overrides])


@dataclass(frozen=True, slots=True)
class Ending:
    """How a run's last attempt ended, and the wall time of all its attempts."""

    code: int
    wall_s: float
    commit: str
    last_lines: str
    """The end of the log if the run failed."""
    machine: str = "unknown"

    @property
    def finished(self) -> bool:
        return self.code == 0

    @property
    def gave_up(self) -> bool:
        """Whether hardly any group had anything to learn from: a result of training, and no failure of the machine."""
        return NothingToLearn.opening in self.last_lines

    @property
    def success_at_giving_up(self) -> float | None:
        """Success in training during the step that the run gave up in; None if it did not, or did not say."""
        said = re.search(r"success rate ([\d.]+)", self.last_lines) if self.gave_up else None
        return float(said[1]) if said else None

    @property
    def failed(self) -> bool:
        return self.code not in (0, INTERRUPTED) and not self.gave_up


def train_command(recipe: Path) -> list[str]:
    return horizonrl_command("train", str(recipe))


def run(request: StudyRequest, command: Command = train_command) -> int:
    """Run a study and write its report. Return 0, 1 if a run failed, or 130 if interrupted.

    Raises ConfigError before the first run if the study or the config of any run is invalid.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingDependency(
            "study learning draws with matplotlib: pip install 'horizonrl[bench]'"
        )
    study, overrides = read_study(request.file), request.overrides
    if request.phase is not None:
        study, set_by_phase = study.phase(request.phase)
        overrides = [*set_by_phase, *overrides]
    seeds, variants = select(study, request.seeds, request.only)
    # All of the phase, not only what was selected: an invalid config is found before hours of training.
    planned = plan(study, request.directory, overrides)
    if study.table is not None:
        for study_run in planned:
            require_kept_checkpoint(study_run)
    runs = [
        study_run
        for study_run in planned
        if study_run.seed in seeds and study_run.variant in variants
    ]
    if not request.report_only:
        for study_run in runs:
            _write_recipe(study_run)
        if not _carry_out(runs, command, study):
            print(
                "stopped; the same command goes on from here, and --report-only shows what there is"
            )
            return INTERRUPTED
    endings = _endings(runs)
    reported = _report(study, endings, request, runs)
    return 0 if reported and not any(ending.failed for _, ending in endings) else 1


def _carry_out(runs: Sequence[StudyRun], command: Command, study: Study) -> bool:
    """Train the runs that are not finished, play their tables, and print one line per run.

    Returns False if interrupted.
    """
    # SIGTERM becomes Ctrl-C, so that `_child` ends its child in order in both cases.
    terminate = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for number, study_run in enumerate(runs, 1):
            ending = _ending(study_run)
            again = ending is None or not (ending.finished or ending.gave_up)
            if ending is None or again:
                ending = _train(study_run, ending, command)
            if ending.finished and study.table and tables_missing(study_run.directory):
                ending = _play_tables(study_run, ending, study.table, study.table_split)
            if ending.code == INTERRUPTED:
                return False
            line = (
                f"[{number}/{len(runs)}] {study_run.name}: {_finish_run(study_run, ending, again)}"
            )
            print(f"{line}; {_tell_rest(runs, number)}", flush=True)
    except KeyboardInterrupt:
        return False
    finally:
        signal.signal(signal.SIGTERM, terminate)
    return True


def _train(study_run: StudyRun, before: Ending | None, command: Command) -> Ending:
    """Run `train` to its end, as `_child` does, and write down how it ended."""
    started = time.monotonic()
    code = _child(command(study_run.directory / RECIPE), study_run.directory / LOG)
    wall_s = time.monotonic() - started + (before.wall_s if before is not None else 0.0)
    return _write_ending(study_run, code, wall_s)


def _play_tables(study_run: StudyRun, trained: Ending, table: TableFile, split: str) -> Ending:
    """Play a run's tables, and write down the ending of one that fails: then the run counts as failed."""
    for words in table_commands(study_run.directory, study_run.config, table, split):
        if code := _child(words, study_run.directory / LOG):
            return _write_ending(study_run, code, trained.wall_s)
    return trained


def _child(words: Sequence[str], log_file: Path) -> int:
    """Run a command to its end. If this process is interrupted, send it SIGTERM and wait for it."""
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with log_file.open("ab") as sink:
        process = subprocess.Popen(words, **detached(sink))
    try:
        return process.wait()
    except KeyboardInterrupt:
        # Not SIGINT: a study started with `nohup ... &` ignores it, and so do its children until they handle it.
        process.send_signal(signal.SIGTERM)
        process.wait()
        return INTERRUPTED


def _write_ending(study_run: StudyRun, code: int, wall_s: float) -> Ending:
    said = "" if code in (0, INTERRUPTED) else last_lines(study_run.directory / LOG)
    ending = Ending(code, wall_s, commit_of_program(), said, describe_machine())
    (study_run.directory / ENDING).write_text(json.dumps(asdict(ending)) + "\n", encoding="utf-8")
    return ending


def _ending(study_run: StudyRun) -> Ending | None:
    path = study_run.directory / ENDING
    return Ending(**json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None


def _endings(runs: Sequence[StudyRun]) -> list[tuple[StudyRun, Ending]]:
    return [(study_run, ending) for study_run in runs if (ending := _ending(study_run)) is not None]


def _finish_run(study_run: StudyRun, ending: Ending, again: bool) -> str:
    """Remove the large folders of a finished run, and return a sentence on how the run ended.

    A failed run keeps its folders, because it resumes from them.
    """
    spent = f"{ending.wall_s / 60:.1f} min"
    if ending.failed:
        return f"failed with code {ending.code} after {spent}, see {study_run.directory / LOG}"
    for path in study_run.directory.iterdir():
        if path.is_dir() and path.name not in KEPT_FOLDERS:
            shutil.rmtree(path)
    return f"finished in {spent}" if again else f"had finished in {spent}"


def _tell_rest(runs: Sequence[StudyRun], done: int) -> str:
    """Return how many runs are left, and for how many minutes at the mean duration of the finished runs."""
    finished = [ending.wall_s for _, ending in _endings(runs) if ending.finished]
    endings = [_ending(study_run) for study_run in runs[done:]]
    unfinished = sum(
        ending is None or not (ending.finished or ending.gave_up) for ending in endings
    )
    pace = (
        f", about {unfinished * sum(finished) / len(finished) / 60:.0f} min"
        if finished and unfinished
        else ""
    )
    return f"{unfinished} to go{pace}"


def _write_recipe(study_run: StudyRun) -> None:
    """Write a run's config, or check that the directory was begun with the same config.

    Raises ConfigError if the directory holds another run. Keys that only one of the two configs has are ignored, so
    that a new version can report an old study.
    """
    path, text = study_run.directory / RECIPE, to_toml(study_run.config)
    if path.is_file():
        old, new = (tomllib.loads(one) for one in (path.read_text(encoding="utf-8"), text))
        new["run"].pop("root", None)  # so that a study's directory can be moved
        if changed := changes(old, new):
            raise ConfigError(
                f"{study_run.directory} was begun with another {changed}: give a new --directory, or remove that run"
            )
    study_run.directory.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Return the settings that both configs have and that differ, as words; empty if there are none."""
    changed = config_changes(_by_index(old), _by_index(new), ABSENT)
    return ", ".join(
        f"{key} ({before!r}, now {after!r})"
        for key, (before, after) in changed.items()
        # A table where the other config has a value: the keys in it are those of one config alone.
        if not any(value is ABSENT or isinstance(value, Mapping) for value in (before, after))
    )


def _by_index(config: Any) -> Any:
    """Return a config with each list of tables as a table by index: of two releases one may know a key of them."""
    if isinstance(config, Mapping):
        return {key: _by_index(value) for key, value in config.items()}
    if isinstance(config, list) and any(isinstance(entry, Mapping) for entry in config):
        return {"length": len(config)} | {
            str(index): _by_index(entry) for index, entry in enumerate(config)
        }
    return config


def _report(
    study: Study,
    endings: Sequence[tuple[StudyRun, Ending]],
    request: StudyRequest,
    selected: Sequence[StudyRun],
) -> bool:
    """Write `results.json`, `report.md` and the plots from the finished runs; return False if there are none."""
    runs: list[ReportedRun] = []
    failures = {study_run.name: ending.last_lines for study_run, ending in endings if ending.failed}
    for study_run, ending in endings:
        if ending.finished or ending.gave_up:
            name, at_end = study_run.variant.name, ending.success_at_giving_up
            outcome = read_outcome(
                study_run.directory, name, study_run.seed, ending.wall_s, ending.gave_up, at_end
            )
            if outcome is None:
                failures[study_run.name] = f"ended before its first RL step. {ending.last_lines}"
            else:
                runs.append(ReportedRun(outcome, ending.commit, ending.machine))
    if not runs:
        print("no run has finished: there is nothing to report yet")
        return False
    outcomes = [study_run.outcome for study_run in runs]
    comparison = compare(study, outcomes)
    configs = {study_run.variant.name: study_run.config for study_run in selected}
    facts = {
        "command": f"`{request}`",
        "recipe": ", ".join(
            dict.fromkeys(
                recipe.name for study_run in selected for recipe in study_run.variant.recipes
            )
        ),
        "seeds": ", ".join(map(str, sorted({outcome.seed for outcome in outcomes}))),
        "finished": f"{len(outcomes)} of {len(selected)} runs",
        "evaluation": _evaluations(configs),
        "commit": ", ".join(sorted({study_run.commit for study_run in runs})),
        "machine": "; ".join(sorted({study_run.machine for study_run in runs})),
    }
    results = {"study": study.name, **facts, "failures": failures, **to_json(comparison, runs)}
    results["configs"] = {name: training_config(config) for name, config in configs.items()}
    request.directory.mkdir(parents=True, exist_ok=True)
    (request.directory / "results.json").write_text(
        json.dumps(results, indent=1) + "\n", encoding="utf-8"
    )
    tables = [
        tables_to_markdown(f"{study_run.variant}, seed {study_run.seed}", study_run.tables)
        for study_run in outcomes
        if study_run.tables
    ]
    plots = [f"![success against {name}]({plot_name(axis)})" for axis, name in AXES.items()]
    ends = [f"## Failed: {name}\n\n```\n{lines}\n```" for name, lines in failures.items()]
    share_of = study.primary_axis if study.primary_axis in comparison.budgets else None
    shown = results_to_markdown(results, ReportOptions(share_of=share_of))
    report = "\n\n".join(
        [f"# {study.name}", f"{facts['finished']} have finished.", *shown, *tables, *plots, *ends]
    )
    (request.directory / "report.md").write_text(report + "\n", encoding="utf-8")
    _draw(study, outcomes, request.directory)
    print(f"report: {request.directory / 'report.md'}")
    return True


def _evaluations(configs: Mapping[str, RunConfig]) -> str:
    """Return what is evaluated: once if all variants have the same tasks, else by variant."""
    played = {name: _evaluation(config) for name, config in configs.items()}
    if len(set(played.values())) == 1:
        return next(iter(played.values()))
    return "; ".join(f"{name}: {text}" for name, text in played.items())


def _evaluation(config: RunConfig) -> str:
    """Return what an evaluation plays: fewer tasks than asked for where an environment holds out fewer."""
    held_out = eval_tasks(config)
    if not held_out:
        return "none: success is that of training episodes"
    counts = Counter(task.category for task in held_out)
    categories = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    return f"{len(held_out)} tasks ({categories}), {config.eval.samples} episodes each"


def _draw(study: Study, outcomes: Sequence[RunOutcome], directory: Path) -> None:
    """Draw the curves in one panel, or for a grid of several axes in one panel per value of the first axis."""
    from horizonrl.ops.studies.plots import plot_success  # here, as matplotlib takes half a second

    split = len(study.axes) > 1
    title = " and ".join(study.axes[1:] if split else study.axes) or "variant"
    places = {
        study_run.name: (study_run.names[0], "-".join(study_run.names[1:]))
        if split
        else ("", study_run.name)
        for study_run in study.variants
    }
    order = list(dict.fromkeys(name for _, name in places.values()))
    for axis in AXES:
        by_variant = bands(outcomes, axis)
        panels: dict[str, dict[str, Any]] = {}
        for variant, (panel, name) in places.items():
            if variant in by_variant:
                panels.setdefault(panel, {})[name] = by_variant[variant]
        plot_success(panels, order, AXES[axis], title, directory / plot_name(axis))
