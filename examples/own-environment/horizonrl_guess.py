"""Guess: find a number from 0 to 99. Each answer says whether the secret number is higher or lower."""

from collections.abc import Sequence
from hashlib import sha256
from typing import Annotated, ClassVar

from pydantic import Field, validate_call

from horizonrl.common.errors import ConfigError, EnvironmentFailure
from horizonrl.envs.api import Observation, Reply, Split, Step, TaskSpec, ToolCall, Tools
from horizonrl.envs.formats import (
    ActionFormat,
    Command,
    Unreadable,
    explain,
    make_tools,
    read_action,
    read_call,
    write_reply,
)

COMMANDS = (Command("guess", "guess {number}", "guess the number"),)
NUMBERS = range(100)


def split_of(task_id: str) -> Split:
    """Assign a fifth of the tasks to validation, and a fifth to test. New tasks move no other task."""
    splits: tuple[Split, ...] = ("test", "validation", "train", "train", "train")
    return splits[sha256(task_id.encode()).digest()[0] % 5]


TASKS = tuple(TaskSpec(f"number-{n:02d}", split_of(f"number-{n:02d}"), "all") for n in NUMBERS)


class Guess:
    """One game at a time.

    format: how the agent writes its action (react, plain, function, code, native)
    max_guesses: number of guesses after which the game is lost
    """

    env_id: ClassVar[str] = "guess"
    version: ClassVar[str] = "1"  # change it when rules or tasks change: every group records it

    @validate_call
    def __init__(
        self, *, format: ActionFormat = "react", max_guesses: Annotated[int, Field(ge=1)] = 10
    ) -> None:
        self.native = format == "native"  # the agent calls tools
        self._format = format
        self._max_guesses = max_guesses
        self._secret: int | None = None
        self._guesses = 0
        self.low, self.high = NUMBERS[0], NUMBERS[-1]

    @classmethod
    def tasks(cls) -> Sequence[TaskSpec]:
        """Return the same tasks in the same order every time."""
        return TASKS

    async def reset(self, task_id: str) -> Observation:
        if all(task.task_id != task_id for task in TASKS):
            raise ConfigError(f"guess has no task {task_id!r}: a task is number-00 to number-99")
        self._secret, self._guesses = int(task_id.removeprefix("number-")), 0
        self.low, self.high = NUMBERS[0], NUMBERS[-1]
        return Observation(
            f"Find a number from 0 to 99: guess N. {explain(self._format, COMMANDS)}"
        )

    async def step(self, text: str) -> Step:
        return self._follow(read_action(text, self._format, COMMANDS))

    def tools(self) -> Tools:
        return make_tools(COMMANDS)

    async def call(self, call: ToolCall) -> Step:
        return self._follow(read_call(call, COMMANDS))

    def _follow(self, action: str | Unreadable) -> Step:
        if self._secret is None:
            raise EnvironmentFailure("no game is in progress: call reset before step")
        if isinstance(action, Unreadable):
            return self._answer(action.reason)
        number = action.removeprefix("guess ").strip()
        if not (number.isascii() and number.isdecimal() and len(number) < 3):
            return self._answer("That is not a number from 0 to 99.")
        guess = int(number)
        if guess == self._secret:
            self._secret = None
            return Step("Right.", reward=1.0, terminated=True, success=True)
        if guess < self._secret:
            self.low = max(self.low, guess + 1)
            return self._answer("It is higher.")
        self.high = min(self.high, guess - 1)
        return self._answer("It is lower.")

    def _answer(self, observation: str) -> Step:
        self._guesses += 1
        lost = self._guesses == self._max_guesses
        if lost:
            self._secret = None
        return Step(observation, reward=0.0, terminated=lost)

    def expert(self) -> "Expert":
        if self._secret is None:
            raise EnvironmentFailure("no game is in progress: call reset before expert")
        return Expert(self, self._format)

    async def close(self) -> None:
        self._secret = None


class Expert:
    """Bisects the remaining range. It provides demonstrations and proves that every task can be solved."""

    def __init__(self, game: Guess, format: ActionFormat) -> None:
        self._game = game
        self._format: ActionFormat = format

    def act(self, observation: str) -> str:
        return self.reply(observation).text

    def reply(self, observation: str) -> Reply:
        low, high = self._game.low, self._game.high
        return write_reply(
            f"guess {(low + high) // 2}", f"It is from {low} to {high}.", self._format, COMMANDS
        )
