"""ScienceWorld: experiments of elementary science in a house, in words. The rewards of an episode add up to its score.

The simulator runs in a JVM (jvm.py). Its calls wait in a thread, never in the event loop.
"""

from collections.abc import Sequence
from typing import ClassVar

from pydantic import validate_call

from horizonrl.common.errors import ConfigError, EnvironmentFailure
from horizonrl.envs.api import Observation, Step, TaskSpec
from horizonrl.envs.bounds import MAX_OBSERVATION_CHARS, Chars, clip, whole
from horizonrl.envs.formats import (
    ActionFormat,
    Unreadable,
    WrittenFormat,
    read_action,
    write_action,
)
from horizonrl.envs.worlds.sciworld.jvm import SCIENCEWORLD, Seen, Simulation, prepare, require_java
from horizonrl.envs.worlds.sciworld.prompt import COMMANDS, VALID_ACTIONS, Style, first_observation
from horizonrl.envs.worlds.sciworld.tasks import SciWorldTask, index_tasks, list_tasks

MAX_STEPS = 100
"""The turn limit of an episode."""
MOST_MOVES = 100
"""In AgentGym's style, the limit on moves as the simulator counts them, taken from ScienceWorld's own wrapper."""
MAX_ACTION_CHARS = 200
"""More than enough: the longest action of any solution has fewer than 100 characters."""

_SOLUTIONS: dict[str, list[str]] = {}
"""The solutions of the tasks that an expert has played in this process."""


class SciWorldExpert:
    """Follows the simulator's own solution from the first turn. It cannot recover if the agent has left it."""

    def __init__(self, environment: "SciWorld", task: SciWorldTask, simulation: Simulation) -> None:
        self._environment = environment
        self._task = task
        self._simulation = simulation

    def act(self, observation: str) -> str:
        """Return the action of the solution at this turn. The first call waits for the simulator, up to seconds."""
        if self._environment.turns >= len(self._solution):
            raise EnvironmentFailure(
                f"the simulator's solution of task {self._task.spec.task_id} ends after {len(self._solution)} turns"
            )
        return self._environment.write(self._solution[self._environment.turns])

    @property
    def _solution(self) -> list[str]:
        task = self._task
        if task.spec.task_id not in _SOLUTIONS:
            _SOLUTIONS[task.spec.task_id] = self._simulation.gold_path(task.name, task.variation)
        return _SOLUTIONS[task.spec.task_id]


class SciWorld:
    """One experiment at a time, in a simulation of its own.

    format: how the agent names its action (envs/formats.py)
    style: `full` explains every command, `compact` lists them, `agentgym` leaves them to AgentGym's clients
    max_observation_chars: bound of every observation; a first observation that does not fit is a ConfigError
    """

    env_id: ClassVar[str] = "sciworld"
    version: ClassVar[str] = f"1 scienceworld=={SCIENCEWORLD}"

    @validate_call
    def __init__(
        self,
        *,
        format: WrittenFormat = "react",
        style: Style = "full",
        max_observation_chars: Chars = MAX_OBSERVATION_CHARS,
    ) -> None:
        require_java()
        self._format: ActionFormat = format
        self._style: Style = style
        self._max_chars = max_observation_chars
        self._simulation: Simulation | None = None
        self._task: SciWorldTask | None = None
        self._over = False
        self._score = 0
        self.turns = 0

    @classmethod
    def tasks(cls) -> Sequence[TaskSpec]:
        """Return the 2,320 tasks, by AgentGym's numbers."""
        return list_tasks()

    @classmethod
    def prepare(cls) -> bool:
        """Start the JVM ahead of need and let it compile, in pieces of five steps."""
        return prepare()

    async def reset(self, task_id: str) -> Observation:
        """Begin an experiment with any of AgentGym's numbers. If the JVM has died, a new simulation is opened."""
        task = index_tasks().get(task_id)
        if task is None:
            raise ConfigError(
                f"sciworld has no task {task_id[:80]!r}: a task is 0 to {len(index_tasks()) - 1}"
            )
        # No step is taken in a task whose reset failed.
        self._task = None
        if self._simulation is None or not self._simulation.lives:
            await self.close()
            self._simulation = await Simulation.open()
        description, seen = await self._simulation.load(task.name, task.variation)
        text = first_observation(description, seen.observation, self._style, self._format)
        text = whole(text, task_id, self._max_chars)
        self._task, self._over, self._score, self.turns = task, False, 0, 0
        return Observation(text)

    async def step(self, text: str) -> Step:
        """Take the one action that the text names. A score below zero ends the episode."""
        task, simulation = self._current()
        if self._over:
            raise EnvironmentFailure(
                f"the episode of task {task.spec.task_id} is over: reset before the next step"
            )
        # Before the reply is read: a reply without an action costs a turn too.
        self.turns += 1
        match read_action(text, self._format, COMMANDS):
            case Unreadable(reason):
                seen = Seen(reason, self._score, completed=False)
            case str(action):
                seen = await self._act(simulation, " ".join(action[:MAX_ACTION_CHARS].split()))
        gained, self._score = seen.score - self._score, seen.score
        terminated = seen.completed or seen.score < 0
        cut = seen.moves > MOST_MOVES if self._style == "agentgym" else self.turns >= MAX_STEPS
        self._over = terminated or cut
        return Step(
            clip(seen.observation, self._max_chars),
            reward=gained / 100,
            terminated=terminated,
            truncated=self._over and not terminated,
            success=terminated and seen.score >= 100,
            info={"score": seen.score},
        )

    def expert(self) -> SciWorldExpert:
        """Return an expert that solves the task from its first turn."""
        return SciWorldExpert(self, *self._current())

    def write(self, action: str) -> str:
        """Return the reply that takes an action."""
        return write_action(action, "This is the next step.", self._format, COMMANDS)

    async def close(self) -> None:
        simulation, self._simulation, self._task = self._simulation, None, None
        if simulation is not None:
            await simulation.close()

    async def _act(self, simulation: Simulation, action: str) -> Seen:
        if action.lower() == VALID_ACTIONS and self._style != "agentgym":
            return Seen(", ".join(await simulation.valid_actions()), self._score, completed=False)
        return await simulation.step(action)

    def _current(self) -> tuple[SciWorldTask, Simulation]:
        if self._task is None or self._simulation is None:
            raise EnvironmentFailure("no episode has begun: reset before step and expert")
        return self._task, self._simulation
