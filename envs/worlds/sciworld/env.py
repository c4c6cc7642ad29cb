"""ScienceWorld: experiments of elementary science in a house, in words. The rewards of an episode add up to its score.

The simulator runs in a JVM (jvm.py). Its calls wait in a thread, never in the event loop.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import validate_call

from horizonrl.common.errors import ConfigError, EnvironmentFailure
from horizonrl.envs.api import Step, TaskSpec
from horizonrl.envs.formats import WrittenFormat
from horizonrl.envs.game import Move, MoveExpert, Style, TurnEnvironment
from horizonrl.envs.text_limits import MAX_OBSERVATION_CHARS, Chars
from horizonrl.envs.worlds.sciworld.jvm import SCIENCEWORLD, Seen, Simulation, prepare, require_java
from horizonrl.envs.worlds.sciworld.prompt import COMMANDS, VALID_ACTIONS, first_observation
from horizonrl.envs.worlds.sciworld.tasks import SciWorldTask, index_tasks, list_tasks

MAX_STEPS = 100
"""The turn limit of an episode."""
MOST_MOVES = 100
"""In AgentGym's style, the limit on moves as the simulator counts them, taken from ScienceWorld's own wrapper."""
MAX_ACTION_CHARS = 200
"""More than enough: the longest action of any solution has fewer than 100 characters."""

_SOLUTIONS: dict[str, list[str]] = {}
"""The solutions of the tasks that an expert has played in this process."""


@dataclass(slots=True)
class Experiment:
    """A task in progress."""

    task: SciWorldTask
    simulation: Simulation
    score: int = 0
    turns: int = 0

    def advise(self) -> Move:
        """Return the action of the simulator's own solution at this turn, however the agent has played before it.

        The first call waits for the simulator, up to seconds.
        """
        task_id = self.task.task_id
        if task_id not in _SOLUTIONS:
            _SOLUTIONS[task_id] = self.simulation.gold_path(self.task.name, self.task.variation)
        solution = _SOLUTIONS[task_id]
        if self.turns >= len(solution):
            raise EnvironmentFailure(
                f"the simulator's solution of task {task_id} ends after {len(solution)} turns"
            )
        return Move(solution[self.turns], "This is the next step.")


class SciWorld(TurnEnvironment[Experiment]):
    """One experiment at a time, in a simulation of its own.

    format: how the agent names its action (envs/formats.py)
    style: `full` explains every command, `compact` lists them, `agentgym` leaves them to AgentGym's clients
    max_observation_chars: bound of every observation; a first observation that does not fit is a ConfigError
    """

    env_id = "sciworld"
    commands = COMMANDS
    version = f"1 scienceworld=={SCIENCEWORLD}"

    @validate_call
    def __init__(
        self,
        *,
        format: WrittenFormat = "react",
        style: Style = "full",
        max_observation_chars: Chars = MAX_OBSERVATION_CHARS,
    ) -> None:
        require_java()
        super().__init__(format, max_observation_chars)
        self._style: Style = style
        self._simulation: Simulation | None = None

    @classmethod
    def tasks(cls) -> Sequence[TaskSpec]:
        """Return the 2,320 tasks, by AgentGym's numbers."""
        return list_tasks()

    @classmethod
    def prepare(cls) -> bool:
        """Start the JVM ahead of need and let it compile, in pieces of five steps."""
        return prepare()

    async def start(self, task_id: str) -> tuple[str, Experiment]:
        """Begin an experiment with any of AgentGym's numbers. If the JVM has died, a new simulation is opened."""
        task = index_tasks().get(task_id)
        if task is None:
            raise ConfigError(
                f"sciworld has no task {task_id[:80]!r}: a task is 0 to {len(index_tasks()) - 1}"
            )
        if self._simulation is None or not self._simulation.lives:
            await self.close()
            self._simulation = await Simulation.open()
        description, seen = await self._simulation.load(task.name, task.variation)
        text = first_observation(description, seen.observation, self._style, self._format)
        return text, Experiment(task, self._simulation)

    async def follow(self, game: Experiment, action: str) -> Step:
        """Take an action. A score below zero ends the episode."""
        action = " ".join(action[:MAX_ACTION_CHARS].split())
        if action.lower() == VALID_ACTIONS and self._style != "agentgym":
            return self.refuse(game, ", ".join(await game.simulation.valid_actions()))
        return self._count(game, await game.simulation.step(action))

    def refuse(self, game: Experiment, reason: str) -> Step:
        """Answer without a move in the simulation, which costs a turn too."""
        return self._count(game, Seen(reason, game.score, completed=False))

    def _count(self, game: Experiment, seen: Seen) -> Step:
        game.turns += 1
        gained, game.score = seen.score - game.score, seen.score
        terminated = seen.completed or seen.score < 0
        cut = seen.moves > MOST_MOVES if self._style == "agentgym" else game.turns >= MAX_STEPS
        return Step(
            seen.observation,
            reward=gained / 100,
            terminated=terminated,
            truncated=cut and not terminated,
            success=terminated and seen.score >= 100,
            info={"score": seen.score},
        )

    def expert(self) -> MoveExpert:
        """Return an expert that solves the task from its first turn. It cannot recover if the agent has left it."""
        experiment = self._current()
        return self._expert(lambda observation: experiment.advise())

    async def close(self) -> None:
        """Release the simulation."""
        await super().close()
        simulation, self._simulation = self._simulation, None
        if simulation is not None:
            await simulation.close()
