"""The base class of environments that play a hub's tasks with the hub's own package, in this process.

A `Played` is one task in progress. It knows nothing about formats, length limits or episodes that have ended, and the
base class knows nothing about the hub. All calls into a package run in one thread, since some take seconds, and with
the episode's own random numbers; what a package prints there is dropped.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Protocol, TypeVar

from pydantic import Field

from horizonrl.common.errors import ConfigError, EnvironmentFailure, HorizonError
from horizonrl.envs.api import Step, TaskSpec
from horizonrl.envs.formats import ActionFormat, explain
from horizonrl.envs.game import TurnEnvironment
from horizonrl.envs.hubs.packages import quiet
from horizonrl.envs.hubs.randomness import OwnRandom
from horizonrl.envs.in_thread import in_thread
from horizonrl.envs.splits import hashed_split

TaskCount = Annotated[int, Field(ge=1, le=100_000)]
"""The type of `tasks`: how many tasks of each category are listed."""


class Played(Protocol):
    """One task of a hub in progress."""

    def follow(self, action: str) -> Step:
        """Answer an action. What it raises breaks the episode."""

    def close(self) -> None:
        """Release what the hub holds."""


P = TypeVar("P", bound=Played)


class HubEnvironment(TurnEnvironment[P]):
    """Plays one task at a time. A subclass defines its id, version and commands, lists its tasks and begins one."""

    def __init__(self, format: ActionFormat, max_observation_chars: int) -> None:
        super().__init__(format, max_observation_chars)
        self._random = OwnRandom("")

    @abstractmethod
    def begin(self, task_id: str) -> tuple[str, P]:
        """Return the first observation and the task in progress. Raises ConfigError for a task that does not exist."""

    async def start(self, task_id: str) -> tuple[str, P]:
        """Begin a task in the thread."""
        return await in_thread(self._start, task_id)

    async def follow(self, game: P, action: str) -> Step:
        """Let the hub answer in the thread."""
        return await in_thread(self._follow, game, action)

    async def close(self) -> None:
        await in_thread(self._leave)

    def manual(self) -> str:
        """Return how to reply, for the first observation."""
        return explain(self._format, self.commands)

    def parse_id(
        self, task_id: str, categories: Mapping[str, object] | Sequence[str]
    ) -> tuple[str, int]:
        """Return a task's category and number. Raises ConfigError for a task that does not exist."""
        if (number := read_number(task_id, categories)) is None:
            raise ConfigError(
                f"{self.env_id} has no task {task_id[:80]!r}: "
                f"`horizonrl envs list {self.env_id}` lists their categories"
            )
        return number

    def _start(self, task_id: str) -> tuple[str, P]:
        self._leave()
        self._random = OwnRandom(f"{self.env_id} {task_id}")
        with self._random.random_for(), quiet(), attributed(self.env_id):
            text, game = self.begin(task_id)
        # Here, so that a reset that is cancelled leaves nothing open.
        self._game = game
        return text, game

    def _follow(self, game: P, action: str) -> Step:
        with self._random.random_for(), quiet(), attributed(self.env_id):
            return game.follow(action)

    def _leave(self) -> None:
        game, self._game = self._game, None
        if game is not None:
            game.close()


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
