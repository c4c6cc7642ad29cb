"""Runs and evaluations side by side: what each came to on held-out tasks, and by how much it differs from the first.

Pure functions of what directories hold. Evaluations of the same tasks are compared task by task; of runs, only counts
are kept, so they are compared as independent samples.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from horizonrl.common.errors import ConfigError
from horizonrl.common.run_dir import CONFIG
from horizonrl.common.statistics import mean, newcombe, paired_interval, wilson
from horizonrl.ops.evaluation.journal import FILE, read_journal
from horizonrl.ops.report.curves import NamedRun, overlaid
from horizonrl.ops.rundir.directory import public_config, read_config
from horizonrl.ops.rundir.files import Files
from horizonrl.ops.rundir.view import RunView

MOST = 7
"""Directories on one page: there are no more colours that a reader can tell apart."""
Part = tuple[str, str]
"""Environment and category."""
WHOLE: Part = ("all", "")
NEITHER = f", and no {FILE} of an evaluation"
"""What else a directory lacks that is not a run's."""


@dataclass(frozen=True)
class Compared:
    """One run or evaluation, as far as it is compared."""

    name: str
    kind: str
    """`run` or `evaluation`."""
    badges: Sequence[str]
    settings: Mapping[str, Any]
    """Flat, so that differences can be listed by key."""
    counts: Mapping[Part, tuple[int, int]]
    """Held-out successes and valid episodes; empty for a run without an evaluation."""
    tasks: Mapping[Part, Mapping[str, float]] = field(default_factory=dict)
    """Of an evaluation, each task's share of solved episodes."""
    files: Files | None = None
    """Of a run."""


def is_evaluation(directory: Path) -> bool:
    return (directory / FILE).is_file() and not (directory / CONFIG).is_file()


def read_compared(directories: Sequence[Path]) -> list[Compared]:
    """Read what is to be compared. Raises ConfigError for what is neither a run nor an evaluation."""
    if len(directories) > MOST:
        raise ConfigError(f"{len(directories)} directories: a page compares {MOST} at most")
    if len({subject.resolve() for subject in directories}) < len(directories):
        raise ConfigError("the same directory is given twice: a run does not differ from itself")
    names = _names(directories)
    return [
        (_evaluation if is_evaluation(subject) else _run)(subject, name)
        for subject, name in zip(directories, names, strict=True)
    ]


def comparison(compared: Sequence[Compared]) -> dict[str, Any]:
    """Return what the page of a comparison shows, as JSON-able values. The first one is what the others differ from."""
    shown = {
        "kind": "comparison",
        "name": ", ".join(subject.name for subject in compared),
        "written": time.time(),
        "notices": list(_notices(compared)),
        "subjects": [
            {"name": subject.name, "kind": subject.kind, "badges": list(subject.badges)}
            for subject in compared
        ],
        "rows": _rows(compared),
        "settings": _different(compared),
    }
    named = [
        NamedRun(one.name, number, one.files.metrics, one.files.evals)
        for number, one in enumerate(compared)
        if one.files is not None
    ]
    return shown | {"curves": overlaid(named), "resumes": [], "imitation": 0}


def _run(directory: Path, name: str) -> Compared:
    config = read_config(directory, besides=NEITHER)
    view = RunView.read(directory, config)
    badges = [
        view.state,
        f"step {view.step} of {view.steps}",
        config.advantage.kind,
        f"{config.horizon.kind} horizon",
    ]
    if (resumes := len(view.files.lineages) - 1) > 0:
        badges.append(f"resumed {resumes}x")
    return Compared(
        name, "run", badges, _flat(public_config(config)), _last(view.files), {}, view.files
    )


def _last(files: Files) -> dict[Part, tuple[int, int]]:
    """Return the counts of the run's last evaluation with a valid episode, by part and as a whole."""
    rounds = [line for line in files.evals if line["episodes"]]
    if not rounds:
        return {}
    last = rounds[-1]
    parts = {
        (env, category): (part["successes"], part["episodes"])
        for env, measured in last["environments"].items()
        for category, part in measured["categories"].items()
        if part["episodes"]
    }
    return {WHOLE: (last["successes"], last["episodes"]), **parts}


def _evaluation(directory: Path, name: str) -> Compared:
    settings, lines = read_journal(directory)
    tasks: dict[Part, dict[str, list[bool]]] = {}
    broken = 0
    for line in lines.values():
        if line.stop.broken:  # not a zero (invariants: Broken is not zero)
            broken += 1
            continue
        for part in (WHOLE, (line.env, line.category)):
            tasks.setdefault(part, {}).setdefault(f"{line.env}/{line.task}", []).append(
                line.success
            )
    badges = ["evaluation", f"{len(lines)} episodes", *([f"{broken} broken"] if broken else [])]
    return Compared(
        name,
        "evaluation",
        badges,
        _flat(settings),
        {part: _count_ends(played.values()) for part, played in tasks.items()},
        {
            part: {task: sum(ends) / len(ends) for task, ends in played.items()}
            for part, played in tasks.items()
        },
    )


def _count_ends(ends: Any) -> tuple[int, int]:
    flat = [end for of_task in ends for end in of_task]
    return sum(flat), len(flat)


def _names(directories: Sequence[Path]) -> list[str]:
    """Return the shortest ends of the paths that tell them apart."""
    parts = [subject.resolve().parts for subject in directories]
    length = 1
    while len({subject[-length:] for subject in parts}) < len(parts):
        length += 1
    return ["/".join(subject[-length:]) for subject in parts]


def _rows(compared: Sequence[Compared]) -> list[dict[str, Any]]:
    """Return a row per environment and category that any of them has played, the whole first."""
    parts = sorted({part for subject in compared for part in subject.counts if part != WHOLE})
    shown = [WHOLE, *parts] if len(parts) > 1 else parts
    return [
        {
            "task": part[0] if part[1] in ("", "all") else " ".join(part),
            "cells": [_cell(subject, compared[0], part) for subject in compared],
        }
        for part in shown
    ]


def _cell(one: Compared, first: Compared, part: Part) -> dict[str, Any] | None:
    if part not in one.counts:
        return None
    successes, episodes = one.counts[part]
    low, high = wilson(successes, episodes)
    cell = {"value": successes / episodes, "low": low, "high": high, "episodes": episodes}
    return cell | {"difference": None if one is first else _difference(one, first, part)}


def _difference(one: Compared, first: Compared, part: Part) -> dict[str, Any] | None:
    """Return the difference in success with its interval; None where the two did not play the same."""
    if part not in first.counts or (part == WHOLE and set(one.counts) != set(first.counts)):
        return None
    if part in one.tasks and part in first.tasks:
        both = one.tasks[part].keys() & first.tasks[part].keys()
        pairs = [one.tasks[part][task] - first.tasks[part][task] for task in sorted(both)]
        return _describe_difference(
            mean(pairs), paired_interval(pairs), f"{len(pairs)} tasks, in pairs"
        )
    (k, n), (k_first, n_first) = one.counts[part], first.counts[part]
    return _describe_difference(
        k / n - k_first / n_first, newcombe((k, n), (k_first, n_first)), "as independent samples"
    )


def _describe_difference(
    value: float | None, bounds: tuple[float, float], how: str
) -> dict[str, Any] | None:
    if value is None:
        return None
    return {
        "value": value,
        "low": bounds[0],
        "high": bounds[1],
        "how": how,
        "differs": bounds[0] > 0 or bounds[1] < 0,
    }


def _notices(compared: Sequence[Compared]) -> Iterator[str]:
    for subject in compared:
        if not subject.counts:
            what = "complete evaluation" if subject.kind == "run" else "episode that did not break"
            yield f"{subject.name} has no {what}, so it has no row of its own."
    parts = {frozenset(subject.counts) for subject in compared if subject.counts}
    if len(parts) > 1:
        yield "They did not play the same environments and categories. Only what two have in common is compared."
    if len({subject.kind for subject in compared}) > 1:
        yield "A run is judged by its last evaluation during training, whose tasks and turns may be other ones."


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, Mapping):
            flat |= _flat(value, name)
        elif (
            isinstance(value, list)
            and value
            and all(isinstance(subject, Mapping) for subject in value)
        ):
            for number, subject in enumerate(value):
                flat |= _flat(subject, f"{name}[{number}]")
        else:
            flat[name] = value
    return flat


def _different(compared: Sequence[Compared]) -> list[list[Any]] | None:
    """Return the keys in which settings differ, with a value for each; of runs among runs, and of evaluations.

    None where no two are of a kind.
    """
    rows: list[list[Any]] = []
    kinds = [
        [subject for subject in compared if subject.kind == kind] for kind in ("run", "evaluation")
    ]
    if max(map(len, kinds)) < 2:
        return None
    for members in kinds:
        for key in dict.fromkeys(key for subject in members for key in subject.settings):
            values = [subject.settings.get(key) for subject in members]
            if key != "run.name" and any(value != values[0] for value in values):
                texts = (
                    _text(subject.settings.get(key)) if subject in members else ""
                    for subject in compared
                )
                rows.append([key, *texts])
    return rows


def _text(value: Any) -> str:
    return "none" if value is None else value if isinstance(value, str) else str(value)
