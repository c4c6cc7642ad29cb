"""Which tasks a server has, by number. Its split lists are not part of AgentGym's servers: a user may give them."""

import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from horizonrl.common.errors import ConfigError
from horizonrl.envs.agentgym.dialects import Dialect
from horizonrl.envs.api import Split, TaskSpec

_RANGE = re.compile(r"([0-9]{1,9})-([0-9]{1,9})")
_NUMBER = re.compile(r"(?:.*_)?([0-9]{1,9})")


@cache
def numbered_tasks(dialect: Dialect, train: str | None, test: str | None) -> Sequence[TaskSpec]:
    """Return a task for each number of the splits, train first. A number that is in both belongs to test alone.

    A split is a range `0-443` or a file, a JSON list of numbers, of ids such as `textcraft_12` or of AgentGym's
    {"item_id": "textcraft_12"}; by default the first `dialect.train` numbers and the `dialect.test` after them.
    """
    for_test = _numbers(test) if test else range(dialect.train, dialect.train + dialect.test)
    for_train = _numbers(train) if train else range(dialect.train)
    tested = set(for_test)
    splits: tuple[tuple[Split, Sequence[int]], ...] = (
        ("train", [number for number in for_train if number not in tested]),
        ("test", for_test),
    )
    return tuple(TaskSpec(str(number), split, "all") for split, numbers in splits for number in dict.fromkeys(numbers))


def _numbers(split: str) -> Sequence[int]:
    if found := _RANGE.fullmatch(split):
        return range(int(found[1]), int(found[2]) + 1)
    try:
        listed = json.loads(Path(split).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{split!r} is neither a range such as 0-443 nor a file with a JSON list: {error}") from None
    if not isinstance(listed, list):
        raise ConfigError(f"{split} holds no JSON list")
    return [_number(entry, split) for entry in listed]


def _number(entry: Any, file: str) -> int:
    found = _NUMBER.fullmatch(str(entry.get("item_id") if isinstance(entry, dict) else entry))
    if found is None:
        raise ConfigError(f'{file}: {entry!r} is no task: a number, "textcraft_12" or {{"item_id": "textcraft_12"}}')
    return int(found[1])
