"""BabyAI: missions in a grid of rooms, played in words. The reward is 1 - 0.9 * steps / most steps, else 0.

The levels are minigrid's, the tasks are AgentGym's, and the text layer is our own (docs/environments/babyai.md lists
the differences). A step takes under 2 ms. A reset draws levels until one can be solved, which takes up to 100 ms, so it
runs in a thread.
"""

from collections.abc import Sequence
from typing import ClassVar

from pydantic import validate_call

from horizonrl.common.errors import ConfigError, EnvironmentFailure
from horizonrl.envs.api import Observation, Step, TaskSpec
from horizonrl.envs.bounds import MAX_OBSERVATION_CHARS, Chars, clip, whole
from horizonrl.envs.formats import ActionFormat, Unreadable, WrittenFormat, read_action
from horizonrl.envs.in_thread import in_thread
from horizonrl.envs.worlds.babyai.agentgym import AgentGymWorld
from horizonrl.envs.worlds.babyai.expert import BabyAIExpert
from horizonrl.envs.worlds.babyai.levels import (
    MINIGRID,
    Levels,
    draw_ahead,
    is_drawn,
    is_number,
    load_tasks,
)
from horizonrl.envs.worlds.babyai.prompt import Style, first_observation, observation
from horizonrl.envs.worlds.babyai.world import COMMANDS, GridWorld


class BabyAI:
    """One mission at a time.

    format: how the agent names its action (envs/formats.py)
    levels: the levels of the listed tasks: `agentgym` for the 18 that AgentGym trains and tests on, `all` for all 40
    style: `full` explains everything and lists the actions, `compact` is for small models, `compat` has AgentGym's
        words, `agentgym` has the same words without the rules, for AgentGym's clients
    max_observation_chars: bound of every observation; a first observation that does not fit is a ConfigError
    """

    env_id: ClassVar[str] = "babyai"
    version: ClassVar[str] = f"2 minigrid=={MINIGRID}"

    @validate_call
    def __init__(
        self,
        *,
        format: WrittenFormat = "react",
        levels: Levels = "agentgym",
        style: Style = "full",
        max_observation_chars: Chars = MAX_OBSERVATION_CHARS,
    ) -> None:
        self._format: ActionFormat = format
        self._style: Style = style
        self._max_chars = max_observation_chars
        self._world: GridWorld | None = None

    @classmethod
    @validate_call
    def tasks(cls, *, levels: Levels = "agentgym") -> Sequence[TaskSpec]:
        """Return the tasks by number: 810 train and 90 test tasks of AgentGym's levels, 1,800 and 200 of all levels."""
        return load_tasks(levels)

    @classmethod
    def prepare(cls, *, levels: Levels = "agentgym") -> bool:
        """Draw a listed level ahead of need. Those of AgentGym take 1.3 s in all, and 4 MB."""
        return draw_ahead(levels)

    async def reset(self, task_id: str) -> Observation:
        """Begin a mission. Any of AgentGym's numbers is valid, listed or not."""
        if not is_number(task_id):
            raise ConfigError(
                f"babyai has no task {task_id[:80]!r}: a task is a number, such as '1804'"
            )
        world_of = AgentGymWorld if self._style in ("compat", "agentgym") else GridWorld
        # Where the level is there already, the thread would take longer than the work.
        world = world_of(task_id) if is_drawn(task_id) else await in_thread(world_of, task_id)
        text = whole(first_observation(world, self._style, self._format), task_id, self._max_chars)
        self._world = world
        return Observation(text)

    async def step(self, text: str) -> Step:
        """Take the one action that the text names."""
        world = self._current()
        if world.over:
            raise EnvironmentFailure(
                f"the episode of task {world.task_id} is over: reset before the next step"
            )
        requested = read_action(text, self._format, COMMANDS)
        if isinstance(requested, Unreadable) and self._style == "agentgym":
            requested = ""  # AgentGym's client sends an empty action for a reply without one
        outcome, answer = (
            world.reject(requested.reason)
            if isinstance(requested, Unreadable)
            else world.follow(requested)
        )
        return Step(
            clip(observation(world, answer, self._style), self._max_chars),
            reward=outcome.reward,
            terminated=outcome.terminated,
            truncated=outcome.truncated,
            success=outcome.terminated and outcome.reward > 0,
            info={"steps": world.steps},
        )

    def state(self) -> str:
        """Return the grid, where the agent stands in it, what it carries, and which parts of the mission are done."""
        return self._current().state

    def expert(self) -> BabyAIExpert:
        """Return an expert that continues from the present state of the episode."""
        return BabyAIExpert(self._current(), self._format)

    async def close(self) -> None:
        self._world = None

    def _current(self) -> GridWorld:
        if self._world is None:
            raise EnvironmentFailure("no episode has begun: reset before step and expert")
        return self._world
