"""The tasks of a server, by number. AgentGym's servers do not include its split lists, so users can supply them."""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from horizonrl.common.errors import ConfigError
from horizonrl.envs.agentgym.dialects import Dialect
from horizonrl.envs.api import Split, TaskSpec
from horizonrl.envs.splits import is_validation

_RANGE = re.compile(r"([0-9]{1,9})-([0-9]{1,9})")
_NAMED = re.compile(r"(?:(.*)_)?([0-9]{1,9})")
_TRIAL = re.compile(r"(?:.*[_/])?(trial_T[0-9]+_[0-9]+_[0-9]+)")
VALIDATION_ONE_IN = 16
MAPPINGS = ("mappings_train.json", "mappings_test.json")
"""In AgentGym's `agentenv-alfworld/configs`: the number of each of ALFRED's trials."""


@cache
def numbered_tasks(
    dialect: Dialect,
    train: str | None,
    validation: str | None,
    test: str | None,
    mappings: str | None,
) -> Sequence[TaskSpec]:
    """Return one task for each number: train, validation, test. In several, it belongs to the last.

    A split is a range such as `0-443`, or a file with a JSON list of numbers, of ids such as
    `textcraft_12`, or of AgentGym's {"item_id": "textcraft_12"}. The default is the first
    `dialect.train` numbers for train and the next `dialect.test` for test; about one in
    VALIDATION_ONE_IN of those for train is for validation. `mappings` is the folder, or one of its
    files, with the numbers of ALFRED's trials.
    """
    for_test = (
        _numbers(dialect, test, mappings)
        if test
        else range(dialect.train, dialect.train + dialect.test)
    )
    for_train = _numbers(dialect, train, mappings) if train else range(dialect.train)
    for_validation = (
        _numbers(dialect, validation, mappings)
        if validation
        else [n for n in for_train if is_validation(f"{dialect.name} {n}", VALIDATION_ONE_IN)]
    )
    tested = set(for_test)
    untrained = tested.union(for_validation)
    splits: tuple[tuple[Split, Sequence[int]], ...] = (
        ("train", [number for number in for_train if number not in untrained]),
        ("validation", [number for number in for_validation if number not in tested]),
        ("test", for_test),
    )
    # Without repetitions, which AgentGym's own lists have.
    return tuple(
        TaskSpec(str(number), split, "all")
        for split, numbers in splits
        for number in dict.fromkeys(numbers)
    )


def _numbers(dialect: Dialect, split: str, mappings: str | None) -> Sequence[int]:
    if match := _RANGE.fullmatch(split):
        return range(int(match[1]), int(match[2]) + 1)
    listed = _list(split, "is neither a range such as 0-443 nor a file with a JSON list")
    return [_number(dialect, entry, split, mappings) for entry in listed]


def _number(dialect: Dialect, entry: Any, file: str, mappings: str | None) -> int:
    """Return the number of one list entry. Raises ConfigError if the entry belongs to another environment."""
    name = str(entry.get("item_id") if isinstance(entry, dict) else entry)
    if dialect.name == "alfworld" and (trial := _TRIAL.fullmatch(name)):
        return _trial_number(trial[1], file, mappings)
    match = _NAMED.fullmatch(name)
    if match is None:
        raise ConfigError(
            f'{file}: {name[:200]!r} is no task: a number, "{dialect.name}_12" or {{"item_id": "{dialect.name}_12"}}'
        )
    if match[1] not in (None, dialect.name, f"lmrlgym_{dialect.name}"):
        raise ConfigError(
            f"{file}: {name[:200]!r} is a task of {match[1]!r}, and this environment is {dialect.name}"
        )
    return int(match[2])


def _trial_number(trial: str, file: str, mappings: str | None) -> int:
    if mappings is None:
        raise ConfigError(
            f"{file} names ALFRED's trials, such as {trial}: set options.mappings to AgentGym's folder "
            "agentenv-alfworld/configs, which has the number of each"
        )
    trials = _trials(mappings)
    if trial not in trials:
        raise ConfigError(f"{file}: {trial} is none of the {len(trials)} trials of {mappings}")
    return trials[trial]


@cache
def _trials(mappings: str) -> Mapping[str, int]:
    path = Path(mappings)
    files = [path / name for name in MAPPINGS] if path.is_dir() else [path]
    entries = [
        entry
        for file in files
        for entry in _list(str(file), "is no mapping of AgentGym's ALFWorld")
    ]
    try:
        return {str(entry["task_id"]): int(entry["item_id"]) for entry in entries}
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{mappings} is no mapping: an entry has no item_id or task_id ({error!r})"
        ) from None


def _list(path: str, wrong: str) -> list[Any]:
    try:
        listed = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path!r} {wrong}: {error}") from None
    if not isinstance(listed, list):
        raise ConfigError(f"{path} holds no JSON list")
    return listed
