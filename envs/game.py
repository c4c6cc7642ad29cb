"""The base class of environments whose world answers one line of words at once.

A `Game` is one task in progress: it follows actions and advises an expert. It knows nothing about formats, length
limits or episodes that have ended. `GameEnvironment` handles those and knows nothing about the rules.
"""

import asyncio
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from random import Random
from typing import ClassVar, Generic, Literal, Protocol, TypeVar

from horizonrl.common.errors import ConfigError, EnvironmentFailure
from horizonrl.envs.api import Observation, Reply, Split, Step, TaskSpec, ToolCall, Tools
from horizonrl.envs.bounds import clip, whole
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

Style = Literal["full", "compact", "agentgym"]
"""`agentgym` reproduces the texts of AgentGym's server. It omits the rules, because AgentGym's clients add them."""

TEST_OF_8 = 2
"""Of eight tasks that `hashed_split` divides, two are held out on average."""


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


G = TypeVar("G", bound=Game)


class GameExpert:
    """The expert. It follows the game's own advice and does not read the observation."""

    def __init__(
        self, game: Game, action_format: ActionFormat, commands: Sequence[Command]
    ) -> None:
        self._game, self._format, self._commands = game, action_format, commands

    def act(self, observation: str) -> str:
        """Return the text of the reply that takes the advised move."""
        return self.reply(observation).text

    def reply(self, observation: str) -> Reply:
        """Return the reply that takes the advised move."""
        move = self._game.advise()
        return write_reply(move.action, move.thought, self._format, self._commands)


class GameEnvironment(ABC, Generic[G]):
    """Plays one game at a time. A subclass defines its id, version and commands, lists its tasks and begins a game."""

    env_id: ClassVar[str]
    version: str
    commands: ClassVar[Sequence[Command]]

    def __init__(self, format: ActionFormat, style: Style, max_observation_chars: int) -> None:
        self._format: ActionFormat = format
        self.native = format == "native"
        self._style: Style = style
        self._max_chars = max_observation_chars
        self._prepared = False
        self._game: G | None = None
        self._over = False

    def prepare(self) -> None:
        """Load or build what takes more than a few milliseconds. Called once per instance, in a thread."""

    @abstractmethod
    def begin(self, task_id: str) -> tuple[str, G]:
        """Return the first observation and the game. Raises ConfigError for a task that does not exist."""

    async def reset(self, task_id: str) -> Observation:
        """Begin a task."""
        if not self._prepared:
            await asyncio.to_thread(self.prepare)
            self._prepared = True
        text, game = self.begin(task_id)
        text = whole(text, task_id, self._max_chars)
        # Last, so that a reset that fails changes nothing.
        self._game, self._over = game, False
        return Observation(text)

    async def step(self, text: str) -> Step:
        """Follow the one action that the text names."""
        return self._follow(self.read(text))

    def tools(self) -> Tools:
        """Return the commands as tools."""
        return make_tools(self.commands)

    async def call(self, call: ToolCall) -> Step:
        """Follow the action that a call names."""
        return self._follow(self.called(call))

    def _follow(self, action: str | Unreadable) -> Step:
        game = self._current()
        if self._over:
            raise EnvironmentFailure("the episode is over: reset before the next step")
        step = refuse_move(action.reason) if isinstance(action, Unreadable) else game.follow(action)
        self._over = step.terminated or step.truncated
        return replace(step, observation=clip(step.observation, self._max_chars))

    def read(self, text: str) -> str | Unreadable:
        """Return the action that a reply names."""
        return read_action(text, self._format, self.commands)

    def called(self, call: ToolCall) -> str | Unreadable:
        """Return the action that a call names."""
        return read_call(call, self.commands)

    def expert(self) -> GameExpert:
        """Return an expert that continues from the present state of the episode."""
        return GameExpert(self._current(), self._format, self.commands)

    async def close(self) -> None:
        self._game = None

    def introduce(self, rules: str, state: str) -> str:
        """Return a first observation: the rules, the commands, how to reply, and the state of the game."""
        if self._style == "agentgym":
            return state
        return "\n".join(filter(None, (rules, self.manual(), state)))

    def manual(self) -> str:
        """Return the commands and how to reply, for the first observation."""
        if self.native:  # the chat template shows the tools
            return explain(self._format, self.commands)
        if self._style == "compact":
            reply = {"plain": "", "react": "\nReply in two lines:\nThought: why\nAction: command"}
            short = f"Commands: {' | '.join(spell_command(command) for command in self.commands)}"
            return short + reply.get(self._format, "\n" + explain(self._format, self.commands))
        listed = "".join(
            f"{spell_command(command)}: {command.meaning}\n" for command in self.commands
        )
        named = (
            ""
            if self._format in ("function", "code")
            else f"Each turn you give one command:\n{listed}"
        )
        return named + explain(self._format, self.commands)

    def unknown(self, task_id: str) -> ConfigError:
        return ConfigError(
            f"{self.env_id} has no task {task_id[:80]!r}: `registry.tasks({self.env_id!r})` lists them"
        )

    def _current(self) -> G:
        if self._game is None:
            raise EnvironmentFailure("no episode has begun: reset before step and expert")
        return self._game


def refuse_move(observation: str) -> Step:
    """Return the answer to an action that changes nothing and earns nothing."""
    return Step(observation, reward=0.0, terminated=False)


def match_command(action: str, commands: Sequence[Command]) -> tuple[str, dict[str, str]] | None:
    """Return the name and the arguments of the first command whose words match the action."""
    for command in commands:
        if match := command.pattern.fullmatch(action):
            return command.name, match.groupdict()
    return None


def spell_command(command: Command) -> str:
    """Return a command's words as agents read them, without the braces around the arguments."""
    return re.sub(r"\{(\w+)\}", r"\1", command.words)


def words(text: str) -> tuple[str, ...]:
    """Return the words of a text as a tuple. Long word lists read better as one text."""
    return tuple(text.split())


def random_for(name: str) -> Random:
    """Return a random generator that depends on the name alone, so it is the same on every machine."""
    # sha256, because `hash()` of a text differs from process to process.
    return Random(int.from_bytes(sha256(name.encode()).digest()))


def hashed_split(task_id: str) -> Split:
    """Return a task's split, which depends on its id alone: longer lists of tasks move none of them."""
    return "test" if sha256(task_id.encode()).digest()[0] % 8 < TEST_OF_8 else "train"


def split_tasks(category_of: Mapping[str, str], test: int) -> tuple[TaskSpec, ...]:
    """Return the tasks in the given order. The `test` tasks whose ids have the lowest sha256 form the test split."""
    # A hash draws the test tasks: no random generator that a new Python may change, and no pattern of the order.
    held_out = frozenset(
        sorted(category_of, key=lambda task_id: sha256(task_id.encode()).digest())[:test]
    )
    return tuple(
        TaskSpec(task_id, "test" if task_id in held_out else "train", category)
        for task_id, category in category_of.items()
    )
