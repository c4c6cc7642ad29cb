"""AgentGym's door into our environments: the dialect that each is served in, the options that give it AgentGym's words,
and the task that each of AgentGym's numbers names.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from horizonrl.envs import registry
from horizonrl.envs.agentgym.dialects import DIALECTS, Dialect
from horizonrl.envs.api import TaskSpec
from horizonrl.envs.wordle import list_words

TOOLS = ("weather", "movie", "academia", "sheet", "todo")
COUNTERPARTS: Mapping[str, str] = {
    **{name: name for name in ("textcraft", "babyai", "sciworld", "maze", "wordle", *TOOLS)},
    "household": "alfworld",
    "shop": "webshop",
    "sql": "sqlgym",
    "deepsearch": "searchqa",
    "webnav": "webarena",
}
"""The id of AgentGym's that each of ours is served as."""

_NUMBERED = ("babyai", "sciworld")
"""Their task ids are AgentGym's numbers. Every number has a task, also those that the environment does not list."""
_TRAIN_FIRST = ("household", "sql")
"""AgentGym's numbers of their counterparts begin with the tasks to train on: so a test task is never trained on."""


@dataclass(frozen=True, slots=True)
class Door:
    """How an environment is served to AgentGym's clients."""

    dialect: Dialect
    options: Mapping[str, Any]


def door_of(env_id: str, options: Mapping[str, Any]) -> Door | None:
    """Return the door of an environment that has a counterpart in AgentGym, or the name of one."""
    own: dict[str, Any]
    if env_id not in COUNTERPARTS:
        dialect = DIALECTS.get(env_id)
        knows_formats = "format" in inspect.signature(registry.load(env_id)).parameters
        own = {"format": "plain"} if knows_formats else {}
        return Door(dialect, {**options, **own}) if dialect else None
    own = {"style": "agentgym", "format": "react" if env_id in TOOLS else "plain"}
    if env_id == "maze":
        own["mazes"] = options.get("mazes", "lmrl")
    if env_id == "deepsearch":
        own["single_answer"] = options.get("single_answer", False)
    return Door(DIALECTS[COUNTERPARTS[env_id]], {**options, **own})


def task_named(env_id: str, tasks: Sequence[TaskSpec]) -> Callable[[int], str | None]:
    """Return the function from a number of AgentGym's to a task of the environment: None where there is none."""
    if env_id in _NUMBERED:
        return _same_number
    named = {number: task_id for task_id, number in numbers_of(env_id, tasks).items()}
    return partial(_looked_up, named)


def numbers_of(env_id: str, tasks: Sequence[TaskSpec]) -> Mapping[str, int]:
    """Return the number of each task: AgentGym's where the tasks are, else a place.

    TextCraft's are places in a list that is sorted by depth, and within a depth as its server's disk lists the recipes:
    ours are sorted by depth and name, so that a number has the depth that it has there.
    """
    if env_id in _NUMBERED:
        return {task.task_id: int(task.task_id) for task in tasks}
    if env_id == "textcraft":
        tasks = sorted(tasks, key=lambda task: (task.category, task.task_id))
    if env_id in _TRAIN_FIRST:
        tasks = sorted(tasks, key=lambda task: task.split == "test")
    return {task.task_id: number for number, task in enumerate(tasks)}


def vocabulary(options: Mapping[str, Any]) -> list[str]:
    """Return the words that Wordle accepts as a guess: its client tells them."""
    words = options.get("words")
    return list(list_words(None if words is None else Path(words)))


def _same_number(number: int) -> str:
    return str(number)


def _looked_up(named: Mapping[int, str], number: int) -> str | None:
    return named.get(number)
