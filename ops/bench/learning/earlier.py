"""Runs that an earlier `results.json` holds: of another machine, or of a sitting whose directory is gone.

Place in the flow: `results.json` → **earlier runs** → comparison. A study of days can be run in parts, each part under
other seeds or variants, and the parts reported together: the file holds the whole outcome of each of its runs.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from horizonrl.common.errors import ConfigError
from horizonrl.ops.bench.learning.outcome import AXES, Curve, RunOutcome, Success
from horizonrl.ops.bench.learning.played import Played
from horizonrl.ops.bench.learning.study import StudyRun, flattened, trained

ORIGIN = ("commit", "machine")
"""What a run in `results.json` says beside its outcome."""


@dataclass(frozen=True, slots=True)
class ReportedRun:
    """An outcome, and where it comes from."""

    outcome: RunOutcome
    commit: str
    machine: str


def read_earlier(paths: Sequence[Path], planned: Sequence[StudyRun]) -> list[ReportedRun]:
    """Read the runs of some `results.json` that are also planned.

    Raises ConfigError if a file cannot be read, if one of its runs had another config than the planned one, or if two
    files hold the same run. As with a study's directory, a setting that only one of two releases knows is ignored.
    """
    earlier = [each for path in paths for each in _read(path, planned)]
    counts = Counter(f"{each.outcome.variant} of seed {each.outcome.seed}" for each in earlier)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise ConfigError(f"the files of --with hold a run twice: {', '.join(twice)}")
    return earlier


def _read(path: Path, planned: Sequence[StudyRun]) -> Iterator[ReportedRun]:
    try:
        results = json.loads(path.read_text())
        configs, runs = results["configs"], results["runs"]
    except OSError as error:
        raise ConfigError(f"--with {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--with {path}: not the results.json of a study, or of a release that did not record the configs of its "
            f"runs ({error!r})"
        ) from None
    by_run = {(each.variant.name, each.seed): each for each in planned}
    for run in runs:
        same = by_run.get((run["variant"], run["seed"]))
        if same is None:
            continue
        if changed := changes(configs[run["variant"]], trained(same.config)):
            raise ConfigError(f"--with {path}: {same.name} was run with another {changed}")
        yield ReportedRun(_outcome(run), run["commit"], run["machine"])


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Return the settings that both configs have and that differ, as words; empty if there are none."""
    before, after = dict(flattened(_by_place(old))), dict(flattened(_by_place(new)))
    differing = sorted(key for key in before.keys() & after.keys() if before[key] != after[key])
    return ", ".join(f"{key} ({before[key]!r}, now {after[key]!r})" for key in differing)


def _by_place(config: Any) -> Any:
    """Return a config with each list of tables as a table by place: of two releases one may know a key of them."""
    if isinstance(config, Mapping):
        return {key: _by_place(value) for key, value in config.items()}
    if isinstance(config, list) and any(isinstance(each, Mapping) for each in config):
        return {"length": len(config)} | {str(place): _by_place(each) for place, each in enumerate(config)}
    return config


def _outcome(run: Mapping[str, Any]) -> RunOutcome:
    kept = {name: value for name, value in run.items() if name not in ORIGIN}
    curve = {name: np.array(run["curve"].get(name, np.nan * np.ones(len(run["curve"]["steps"])))) for name in AXES}
    counts = {name: np.array(run["curve"][name]) for name in ("successes", "episodes")}
    kept |= {"start": Success(**run["start"]), "final": Success(**run["final"]), "curve": Curve(**curve, **counts)}
    kept["played"] = tuple(Played(**each) for each in run.get("played", ()))
    return RunOutcome(**kept)
