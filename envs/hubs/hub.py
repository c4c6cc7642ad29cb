"""The base class of environments that play a hub's tasks with the hub's own package, in this process.

A `Played` is one task in progress. It knows nothing about formats, length limits or episodes that have ended, and the
base class knows nothing about the hub. All calls into a package run in one thread, since some take seconds, and with
the episode's own random numbers; what a package prints there is dropped.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, ClassVar, Generic, Protocol, TypeVar

from pydantic import Field

from horizonrl.common.errors import ConfigError, EnvironmentFailure, HorizonError
from horizonrl.envs.api import Observation, Step, TaskSpec
from horizonrl.envs.bounds import clip, whole
from horizonrl.envs.formats import ActionFormat, Command, Unreadable, explain, read_action
from horizonrl.envs.game import hashed_split, refuse_move
from horizonrl.envs.hubs.packages import quiet
from horizonrl.envs.hubs.randomness import OwnRandom
from horizonrl.envs.in_thread import in_thread

TaskCount = Annotated[int, Field(ge=1, le=100_000)]
"""The type of `tasks`: how many tasks of each category are listed."""


class Played(Protocol):
    """One task of a hub in progress."""

    def follow(self, action: str) -> Step:
        """Answer an action. What it raises breaks the episode."""

    def close(self) -> None:
        """Release what the hub holds."""


P = TypeVar("P", bound=Played)


class HubEnvironment(ABC, Generic[P]):
    """Plays one task at a time. A subclass defines its id, version and commands, lists its tasks and begins one."""

    env_id: ClassVar[str]
    version: str
    commands: ClassVar[Sequence[Command]] = ()

    def __init__(self, format: ActionFormat, max_observation_chars: int) -> None:
        self._format: ActionFormat = format
        self._max_chars = max_observation_chars
        self._played: P | None = None
        self._over = False
        self._random = OwnRandom("")

    @abstractmethod
    def begin(self, task_id: str) -> tuple[str, P]:
        """Return the first observation and the task in progress. Raises ConfigError for a task that does not exist."""

    async def reset(self, task_id: str) -> Observation:
        """Begin a task."""
        return Observation(await in_thread(self._begin, task_id))

    async def step(self, text: str) -> Step:
        """Follow the one action that the text names."""
        played = self._current()
        if self._over:
            raise EnvironmentFailure(
                "the episode is over, or its last step failed: reset before the next step"
            )
        action = self.read(text)
        if isinstance(action, Unreadable):
            return self._bound(refuse_move(action.reason))
        self._over = True  # stays so if the hub does not answer
        step = await in_thread(self._follow, played, action)
        self._over = step.terminated or step.truncated
        return self._bound(step)

    async def close(self) -> None:
        await in_thread(self._leave)

    def read(self, text: str) -> str | Unreadable:
        """Return the action that a reply names."""
        return read_action(text, self._format, self.commands)

    def manual(self) -> str:
        """Return how to reply, for the first observation."""
        return explain(self._format, self.commands)

    def unknown(self, task_id: str) -> ConfigError:
        return ConfigError(
            f"{self.env_id} has no task {task_id[:80]!r}: `horizonrl envs list {self.env_id}` lists their categories"
        )

    def _current(self) -> P:
        if self._played is None:
            raise EnvironmentFailure("no episode has begun: reset before step and expert")
        return self._played

    def _bound(self, step: Step) -> Step:
        return replace(step, observation=clip(step.observation, self._max_chars))

    def _begin(self, task_id: str) -> str:
        self._leave()
        self._random = OwnRandom(f"{self.env_id} {task_id}")
        with self._random.random_for(), quiet(), attributed(self.env_id):
            text, played = self.begin(task_id)
        try:
            text = whole(text, task_id, self._max_chars)
        except ConfigError:
            played.close()
            raise
        # Last, so that no step is taken in a task whose reset failed.
        self._played, self._over = played, False
        return text

    def _follow(self, played: P, action: str) -> Step:
        with self._random.random_for(), quiet(), attributed(self.env_id):
            return played.follow(action)

    def _leave(self) -> None:
        played, self._played = self._played, None
        if played is not None:
            played.close()


@contextmanager
def attributed(env_id: str) -> Iterator[None]:
    """Turn whatever a hub's package raises into an EnvironmentFailure. A hub that exits must not end the actor."""
    try:
        yield
    except HorizonError:
        raise
    except (Exception, SystemExit) as error:
        raise EnvironmentFailure(
            f"{env_id}: its package raised {type(error).__name__}: {error}"
        ) from error


def numbered_tasks(categories: Sequence[str], count: int) -> tuple[TaskSpec, ...]:
    """Return the tasks `CATEGORY-0` to `CATEGORY-(count - 1)` of each category."""
    ids = ((category, f"{category}-{number}") for category in categories for number in range(count))
    return tuple(TaskSpec(task_id, hashed_split(task_id), category) for category, task_id in ids)


def read_number(
    task_id: str, categories: Mapping[str, object] | Sequence[str]
) -> tuple[str, int] | None:
    """Return the category and number of a task of any number, or None if there is no such task."""
    category, _, number = task_id.rpartition("-")
    plain = number.isascii() and number.isdecimal() and number == str(int(number[:9]))
    return (category, int(number)) if category in categories and plain else None
