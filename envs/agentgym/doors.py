"""How AgentGym's clients enter our environments.

For each environment: the dialect in which it is served, the options that give it AgentGym's texts, and the task for
each of AgentGym's task numbers.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horizonrl.envs import registry
from horizonrl.envs.agentgym.dialects import DIALECTS, Dialect
from horizonrl.envs.api import TaskSpec
from horizonrl.envs.worlds.games.wordle import list_words

TOOLS = ("weather", "movie", "academia", "sheet", "todo")
COUNTERPARTS: Mapping[str, str] = {
    **{name: name for name in ("textcraft", "babyai", "sciworld", "maze", "wordle", *TOOLS)},
    "household": "alfworld",
    "shop": "webshop",
    "sql": "sqlgym",
    "deepsearch": "searchqa",
    "webnav": "webarena",
}
"""The AgentGym id under which each of our environments is served."""

_NUMBERED = ("babyai", "sciworld")
"""Environments whose task ids are AgentGym's numbers. Every number has a task, even if the environment omits it."""
_TRAIN_FIRST = ("household", "sql")
"""Environments whose counterparts number the train tasks first. Ours do too, so that no test task is trained on."""


@dataclass(frozen=True, slots=True)
class Door:
    """How an environment is served to AgentGym's clients."""

    dialect: Dialect
    options: Mapping[str, Any]


def make_door(env_id: str, options: Mapping[str, Any]) -> Door | None:
    """Return the door of an environment that has a counterpart in AgentGym, or whose id is that of one."""
    fixed: dict[str, Any]
    if env_id not in COUNTERPARTS:
        dialect = DIALECTS.get(env_id)
        knows_formats = "format" in inspect.signature(registry.load(env_id)).parameters
        fixed = {"format": "plain"} if knows_formats else {}
        return Door(dialect, {**options, **fixed}) if dialect else None
    fixed = {"style": "agentgym", "format": "react" if env_id in TOOLS else "plain"}
    # AgentGym's task numbers are starts in the one maze of LMRL-Gym.
    if env_id == "maze":
        fixed["mazes"] = options.get("mazes", "lmrl")
    # AgentGym's SearchQA lets an agent answer until it is right.
    if env_id == "deepsearch":
        fixed["single_answer"] = options.get("single_answer", False)
    return Door(DIALECTS[COUNTERPARTS[env_id]], {**options, **fixed})


def task_named(env_id: str, tasks: Sequence[TaskSpec]) -> Callable[[int], str | None]:
    """Return a function from AgentGym's task numbers to our task ids. It returns None for a number without a task."""
    if env_id in _NUMBERED:
        return str
    return {number: task_id for task_id, number in number_tasks(env_id, tasks).items()}.get


def number_tasks(env_id: str, tasks: Sequence[TaskSpec]) -> Mapping[str, int]:
    """Return the number of each task: AgentGym's number if the tasks are AgentGym's, else the position in the list.

    AgentGym numbers TextCraft's tasks by depth and, within a depth, in the order in which the server's disk lists the
    recipes. Ours are sorted by depth and name, so that a number has the same depth on both sides.
    """
    if env_id in _NUMBERED:
        return {task.task_id: int(task.task_id) for task in tasks}
    if env_id == "textcraft":
        tasks = sorted(tasks, key=lambda task: (task.category, task.task_id))
    if env_id in _TRAIN_FIRST:
        tasks = sorted(tasks, key=lambda task: task.split == "test")
    return {task.task_id: number for number, task in enumerate(tasks)}


def vocabulary(options: Mapping[str, Any]) -> list[str]:
    """Return the words that Wordle accepts. AgentGym's client puts them into the rules."""
    words = options.get("words")
    return list(list_words(None if words is None else Path(words)))
