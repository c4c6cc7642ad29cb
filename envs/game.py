"""The base classes of environments that answer one action with one observation.

A `Game` is one task in progress: it follows actions and advises an expert. It knows nothing about formats, length
limits or episodes that have ended. `TurnEnvironment` handles those and knows nothing about the rules; `GameEnvironment`
is one whose world answers a line of words at once.
"""

import asyncio
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from random import Random
from typing import ClassVar, Generic, Literal, Protocol, TypeVar

from pydantic import validate_call

from horizonrl.common.errors import ConfigError, EnvironmentFailure
from horizonrl.envs.api import Observation, Reply, Step, ToolCall, Tools
from horizonrl.envs.contract import require_step
from horizonrl.envs.formats import (
    ActionFormat,
    Command,
    Unreadable,
    explain,
    explain_briefly,
    make_tools,
    read_action,
    read_call,
    write_reply,
)
from horizonrl.envs.text_limits import Chars, clip, whole

Style = Literal["full", "compact", "agentgym"]
"""`agentgym` reproduces the texts of AgentGym's server. It omits the rules, because AgentGym's clients add them."""


@dataclass(frozen=True, slots=True)
class Move:
    """An expert's next action, and the reason for it."""

    action: str
    thought: str


class Game(Protocol):
    """One task in progress."""

    def follow(self, action: str) -> Step:
        """Answer one line of at most `formats.MAX_ACTION_CHARS` characters."""

    def advise(self) -> Move:
        """Return an expert's next move from the present state. The moves solve the task, not always by the fewest."""


G = TypeVar("G")
T = TypeVar("T")
Advised = TypeVar("Advised", bound=Game)


@dataclass(frozen=True, slots=True)
class MoveExpert:
    """An expert that makes the moves which `advise` returns for an observation."""

    advise: Callable[[str], Move]
    action_format: ActionFormat
    commands: Sequence[Command]

    def act(self, observation: str) -> str:
        """Return the text of the reply that makes the advised move."""
        return self.reply(observation).text

    def reply(self, observation: str) -> Reply:
        """Return the reply that makes the advised move."""
        move = self.advise(observation)
        return write_reply(move.action, move.thought, self.action_format, self.commands)


class TurnEnvironment(ABC, Generic[G]):
    """Plays one task at a time. A subclass lists its tasks, starts one and says what follows an action.

    Between `start` and the next one, `G` is what the subclass needs to know of the task in progress.
    """

    env_id: ClassVar[str]
    version: str
    commands: ClassVar[Sequence[Command]] = ()

    def __init__(self, format: ActionFormat, max_observation_chars: int) -> None:
        self._format = format
        self.native = format == "native"
        self._max_chars = max_observation_chars
        self._game: G | None = None
        self._over = False

    @abstractmethod
    async def start(self, task_id: str) -> tuple[str, G]:
        """Return the first observation and the task. Raises ConfigError for a task that does not exist."""

    @abstractmethod
    async def follow(self, game: G, action: str) -> Step:
        """Answer an action. What it raises breaks the episode."""

    def refuse(self, game: G, reason: str) -> Step:
        """Answer a reply that names no action."""
        return refuse_move(reason)

    async def reset(self, task_id: str) -> Observation:
        """Begin a task."""
        self._over = True  # no step is taken in a task whose reset failed
        text, game = await self.start(task_id)
        try:
            text = whole(text, task_id, self._max_chars)
        except ConfigError:
            await self.close()
            raise
        self._game, self._over = game, False
        return Observation(text)

    async def step(self, text: str) -> Step:
        """Follow the one action that the text names."""
        return await self._answer(self.read(text))

    def tools(self) -> Tools:
        """Return the commands as tools."""
        return make_tools(self.commands)

    async def call(self, call: ToolCall) -> Step:
        """Follow the action that a call names."""
        return await self._answer(self.read_call(call))

    def read(self, text: str) -> str | Unreadable:
        """Return the action that a reply names."""
        return read_action(text, self._format, self.commands)

    def read_call(self, call: ToolCall) -> str | Unreadable:
        """Return the action that a call names."""
        return read_call(call, self.commands)

    async def close(self) -> None:
        self._game = None

    def find(self, tasks: Mapping[str, T], task_id: str) -> T:
        """Return what belongs to a task. Raises ConfigError for a task that does not exist."""
        if task_id not in tasks:
            raise ConfigError(
                f"{self.env_id} has no task {task_id[:80]!r}: `registry.tasks({self.env_id!r})` lists them"
            )
        return tasks[task_id]

    async def _answer(self, action: str | Unreadable) -> Step:
        game = self._current()
        if self._over:
            raise EnvironmentFailure(
                "the episode is over, or its last step failed: reset before the next step"
            )
        self._over = True  # stays so if there is no answer
        if isinstance(action, Unreadable):
            step = self.refuse(game, action.reason)
        else:
            step = require_step(self, "follow", await self.follow(game, action))
        self._over = step.terminated or step.truncated
        return replace(step, observation=clip(step.observation, self._max_chars))

    def _current(self) -> G:
        if self._game is None:
            raise EnvironmentFailure(
                "no episode has begun, or it has ended: reset before the next step"
            )
        return self._game

    def _expert(self, advise: Callable[[str], Move]) -> MoveExpert:
        return MoveExpert(advise, self._format, self.commands)


class GameEnvironment(TurnEnvironment[Advised]):
    """Plays one game at a time. A subclass defines its id, version and commands, lists its tasks and begins a game."""

    @validate_call
    def __init__(
        self,
        format: ActionFormat = "react",
        style: Style = "full",
        max_observation_chars: Chars = 4_096,
    ) -> None:
        super().__init__(format, max_observation_chars)
        self._style: Style = style
        self._ready = False

    def load(self) -> None:
        """Load or build what takes more than a few milliseconds. Called once per instance, in a thread."""

    @abstractmethod
    def begin(self, task_id: str) -> tuple[str, Advised]:
        """Return the first observation and the game. Raises ConfigError for a task that does not exist."""

    async def start(self, task_id: str) -> tuple[str, Advised]:
        """Begin a game, once all is loaded."""
        if not self._ready:
            await asyncio.to_thread(self.load)
            self._ready = True
        return self.begin(task_id)

    async def follow(self, game: Advised, action: str) -> Step:
        """Let the game answer."""
        return game.follow(action)

    def expert(self) -> MoveExpert:
        """Return an expert that continues from the present state of the episode, whatever it observes."""
        game = self._current()
        return self._expert(lambda observation: game.advise())

    def introduce(self, rules: str, state: str, brief: str = "") -> str:
        """Return a first observation: the rules, the commands, how to reply, and the state of the game.

        The compact style has `brief` for the rules.
        """
        if self._style == "agentgym":
            return state
        rules = brief if self._style == "compact" else rules
        return "\n".join(filter(None, (rules, self.manual(), state)))

    def manual(self) -> str:
        """Return the commands and how to reply, for the first observation."""
        if self.native:  # the chat template shows the tools
            return explain(self._format, self.commands)
        if self._style == "compact":
            short = f"Commands: {' | '.join(spell_command(command) for command in self.commands)}"
            reply = explain_briefly(self._format, self.commands)
            return "\n".join(filter(None, (short, reply)))
        reply = explain(self._format, self.commands)
        if self._format in ("function", "code"):
            return reply
        return f"Each turn you give one command:\n{list_commands(self.commands)}\n{reply}"


def refuse_move(observation: str) -> Step:
    """Return the answer to an action that changes nothing and earns nothing."""
    return Step(observation, reward=0.0, terminated=False)


def spell_command(command: Command) -> str:
    """Return a command's words as agents read them, without the braces around the arguments."""
    return re.sub(r"\{(\w+)\}", r"\1", command.words)


def list_commands(commands: Sequence[Command]) -> str:
    """Return a line for each command: its words and its meaning."""
    return "\n".join(f"{spell_command(command)}: {command.meaning}" for command in commands)


def words(text: str) -> tuple[str, ...]:
    """Return the words of a text as a tuple. Long word lists read better as one text."""
    return tuple(text.split())


def random_for(name: str) -> Random:
    """Return a random generator that depends on the name alone, so it is the same on every machine."""
    # sha256, because `hash()` of a text differs from process to process.
    return Random(int.from_bytes(sha256(name.encode()).digest()))
