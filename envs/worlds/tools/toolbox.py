"""Tools over a store of rows, and problems to solve with them. The five environments differ only in these."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from random import Random

from horizonrl.envs.formats import Command

Store = dict[str, dict[str, str]]
"""Rows of fields, by key."""


FINISH = Command(
    "finish",
    'finish {"answer": "{answer}"}',
    "end with the answer, or with 'done' if none is asked for",
)


class ToolError(Exception):
    """A tool cannot do what was requested. The agent reads the message."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function of the store and of texts, which have names; returns what the agent sees."""

    name: str
    arguments: tuple[str, ...]
    meaning: str
    run: Callable[..., str]

    def call(self, store: Store, arguments: Mapping[str, str]) -> str:
        """Return what the agent sees. Raises ToolError."""
        return self.run(store, *(arguments[name] for name in self.arguments))

    @property
    def command(self) -> Command:
        """The tool's name, then its arguments as a JSON object."""
        arguments = ", ".join(f'"{name}": "{{{name}}}"' for name in self.arguments)
        return Command(self.name, f"{self.name} {{{arguments}}}", self.meaning)


@dataclass(frozen=True, slots=True)
class Call:
    tool: str
    arguments: Mapping[str, str]


def call(tool: str, **arguments: str) -> Call:
    return Call(tool, arguments)


@dataclass(frozen=True, slots=True)
class Problem:
    goal: str
    store: Store
    calls: tuple[Call, ...]
    """The expert's solution, without the final `finish`."""
    answer: str = ""
    """The right answer for `finish`. If it is empty, the store is judged instead."""


@dataclass(frozen=True, slots=True)
class Domain:
    tools: tuple[Tool, ...]
    categories: tuple[str, ...]
    make: Callable[[str, Random], Problem]
    """Makes a problem of a category."""
    train: int
    test: int = 20

    @property
    def commands(self) -> tuple[Command, ...]:
        return (*(tool.command for tool in self.tools), FINISH)


def find_row(store: Store, key: str) -> dict[str, str]:
    """Return a row. Raises ToolError."""
    if key not in store:
        raise ToolError(f"there is no {key[:60]!r}")
    return store[key]


def format_fields(row: Mapping[str, str]) -> str:
    return ", ".join(f"{name}: {value}" for name, value in row.items())


def join_names(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


def show(store: Store, name: str) -> str:
    """A tool: tell a row."""
    return format_fields(find_row(store, name))
