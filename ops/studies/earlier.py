"""Runs that an earlier `results.json` holds: of another machine or study, or of a sitting whose directory is gone.

Place in the flow: `results.json` → **earlier runs** → comparison. A study of days can be run in parts, each part under
other seeds or variants, and the parts reported together: the file holds the whole outcome of each of its runs.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from horizonrl.common.config.changes import config_changes
from horizonrl.common.errors import ConfigError
from horizonrl.ops.studies.outcome import Curve, RunOutcome, Success
from horizonrl.ops.studies.played import Played
from horizonrl.ops.studies.study import StudyRun, training_config

ORIGIN = ("commit", "machine")
"""What a run in `results.json` says beside its outcome."""
ABSENT = object()
"""In place of a setting that a config does not have."""


@dataclass(frozen=True, slots=True)
class ReportedRun:
    """An outcome, and where it comes from."""

    outcome: RunOutcome
    commit: str
    machine: str


def read_earlier(
    paths: Sequence[Path], study: str, planned: Sequence[StudyRun]
) -> list[ReportedRun]:
    """Read the runs of some `results.json` that are also planned: those with a planned run's config and seed.

    Raises ConfigError if a file cannot be read, if a run of the same study had another config than the planned one, if
    a run could be several of the planned ones, if another study has none of them, or if two files hold the same run. As
    with a study's directory, a setting that only one of two releases knows is ignored.
    """
    earlier = [recorded for path in paths for recorded in _read(path, study, planned)]
    counts = Counter(f"{run.outcome.variant} of seed {run.outcome.seed}" for run in earlier)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise ConfigError(f"the files of --with hold a run twice: {', '.join(twice)}")
    return earlier


def _read(path: Path, study: str, planned: Sequence[StudyRun]) -> Iterator[ReportedRun]:
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        configs, runs = results["configs"], results["runs"]
    except OSError as error:
        raise ConfigError(f"--with {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--with {path}: not the results.json of a study, or of a release that did not record the configs of its "
            f"runs ({error!r})"
        ) from None
    ours, taken = results.get("study") == study, 0
    for run in runs:
        name = run["variant"]
        # Another study may have another name for the same run, and the same name for another run.
        candidates = [
            study_run
            for study_run in planned
            if study_run.seed == run["seed"] and (study_run.variant.name == name or not ours)
        ]
        differing = [
            (study_run, changes(configs[name], training_config(study_run.config)))
            for study_run in candidates
        ]
        same = [study_run for study_run, changed in differing if not changed]
        if ours and candidates and not same:
            raise ConfigError(
                f"--with {path}: {differing[0][0].name} was run with another {differing[0][1]}"
            )
        if len(same) > 1:
            raise ConfigError(
                f"--with {path}: {name} of seed {run['seed']} could be "
                f"{' or '.join(study_run.name for study_run in same)}: its release did not know the settings that "
                "tell them apart"
            )
        for study_run in same:
            taken += 1
            yield ReportedRun(
                replace(_outcome(run), variant=study_run.variant.name),
                run["commit"],
                run["machine"],
            )
    if not ours and not taken:
        raise ConfigError(
            f"--with {path}: of another study, and none of its runs has the config and seed of one here"
        )


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


def _outcome(run: Mapping[str, Any]) -> RunOutcome:
    kept = {name: value for name, value in run.items() if name not in ORIGIN}
    kept |= {
        "start": Success(**run["start"]),
        "final": Success(**run["final"]),
        "curve": Curve(**{name: np.array(values) for name, values in run["curve"].items()}),
    }
    # A release that did not say the split evaluated on `test`.
    measured = kept.pop("measured", "evaluations")
    kept.setdefault("split", "test" if measured == "evaluations" else "train")
    kept["played"] = tuple(Played(**study_run) for study_run in run.get("played", ()))
    return RunOutcome(**kept)
