"""The tasks of MCP environments, and the functions that grade them."""

import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from horizonrl.common.errors import ConfigError
from horizonrl.envs.api import Split
from horizonrl.envs.records import read_records

FORM = '{"task_id": "rome", "prompt": "What is the weather in Rome?", "answer": "sunny"}'


class McpTask(BaseModel):
    """One line of the file. Its other keys are the grader's."""

    model_config = ConfigDict(frozen=True, extra="allow")

    task_id: Annotated[str, Field(min_length=1, max_length=240)]
    prompt: Annotated[str, Field(min_length=1)]
    split: Split = "train"
    category: str = "all"


@dataclass(frozen=True, slots=True)
class MadeCall:
    name: str
    arguments: Mapping[str, Any]
    result: str


@dataclass(frozen=True, slots=True)
class Answered:
    """A task at its end, as a grader sees it."""

    task: McpTask
    """`task.model_extra` has the keys that the file adds."""
    answer: str
    """The agent's last reply, the one without a call."""
    calls: tuple[MadeCall, ...]
    """Every call of the agent that reached the server, in order."""
    call: Callable[[str, Mapping[str, Any]], Awaitable[str]]
    """Calls a tool of the server, to look at what the agent has left behind. Tools that it could not see too."""


Grader = Callable[[Answered], Awaitable[float] | float]


@dataclass(frozen=True, slots=True)
class TaskFile:
    digest: str
    tasks: Mapping[str, McpTask]


def load_tasks(path: Path | None) -> TaskFile:
    """Read a file of tasks, one JSON object per line. Raises ConfigError."""
    if path is None:
        raise ConfigError(
            f"an mcp environment needs options.path: a file with one task per line, such as {FORM}"
        )
    return _load(path)


@cache
def _load(path: Path) -> TaskFile:
    lines, digest = read_records(path, McpTask, FORM)
    tasks: dict[str, McpTask] = {}
    for number, task in lines.items():
        if task.task_id in tasks:
            raise ConfigError(f"{path}, line {number}: there is a task {task.task_id!r} already")
        tasks[task.task_id] = task
    return TaskFile(digest, tasks)


async def grade_answer(grader: Grader, answered: Answered) -> float:
    """Return the grader's reward. Whatever it raises is the environment's failure, not the agent's."""
    reward = grader(answered)
    if inspect.isawaitable(reward):
        reward = await reward
    # A bool is a number; None and a text are mistakes, and a NaN would reach the loss.
    if not isinstance(reward, int | float) or not abs(reward) < 1e9:
        raise TypeError(
            f"the grader returned {reward!r}: return a number, 1 or more for a solved task"
        )
    return float(reward)
