"""The frozen task list: one task for each item that can be crafted, with its depth and its split (`tasks.json`).

Written by `build.py`; listing the tasks needs nothing but the file, playing them needs the recipes it was made of.
"""

import json
from functools import cache
from importlib import resources
from typing import TypedDict

from horizonrl.common.errors import MissingDependency
from horizonrl.envs.api import Split, TaskSpec
from horizonrl.envs.worlds.textcraft.recipes import CURE, RecipeBook, find_recipes, read_book

TASKS_FILE = "tasks.json"


@cache
def load_tasks() -> tuple[TaskSpec, ...]:
    """Return every task, sorted by id."""
    return tuple(
        TaskSpec(t["task_id"], t["split"], f"depth{t['depth']}") for t in _frozen()["tasks"]
    )


@cache
def load_book() -> RecipeBook:
    """Return the installed recipes. Raises MissingDependency unless they are those that the tasks were made of."""
    book = read_book(find_recipes())
    if book.digest != (frozen := _frozen()["recipes_sha256"]):
        raise MissingDependency(
            f"the installed recipes have sha256 {book.digest[:12]}, the frozen tasks were made of {frozen[:12]}: {CURE}"
        )
    return book


def parse_goal(task_id: str) -> str:
    """Return the item that a task asks for."""
    return task_id.replace("_", " ")


def make_task_id(item: str) -> str:
    return item.replace(" ", "_")


class _FrozenTask(TypedDict):
    task_id: str
    depth: int
    split: Split


class _Frozen(TypedDict):
    recipes_sha256: str
    tasks: list[_FrozenTask]


@cache
def _frozen() -> _Frozen:
    text = resources.files(__package__).joinpath(TASKS_FILE).read_text(encoding="utf-8")
    frozen: _Frozen = json.loads(text)
    return frozen
