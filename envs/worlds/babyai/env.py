"""BabyAI: missions in a grid of rooms, played in words. The reward is 1 - 0.9 * steps / most steps, else 0.

The levels are minigrid's, the tasks are AgentGym's, and the text layer is our own (docs/environments/babyai.md lists
the differences). A step takes under 2 ms. A reset draws levels until one can be solved, which takes up to 100 ms, so it
runs in a thread.
"""

from collections.abc import Sequence

from pydantic import validate_call

from horizonrl.common.errors import ConfigError
from horizonrl.envs.api import Step, TaskSpec
from horizonrl.envs.formats import Unreadable, WrittenFormat
from horizonrl.envs.game import MoveExpert, TurnEnvironment
from horizonrl.envs.in_thread import in_thread
from horizonrl.envs.text_limits import MAX_OBSERVATION_CHARS, Chars
from horizonrl.envs.worlds.babyai.agentgym import AgentGymWorld
from horizonrl.envs.worlds.babyai.expert import next_move
from horizonrl.envs.worlds.babyai.levels import (
    MINIGRID,
    Levels,
    draw_ahead,
    is_drawn,
    is_number,
    load_tasks,
)
from horizonrl.envs.worlds.babyai.prompt import Style, first_observation, observation
from horizonrl.envs.worlds.babyai.world import COMMANDS, GridWorld, Outcome


class BabyAI(TurnEnvironment[GridWorld]):
    """One mission at a time.

    format: how the agent names its action (envs/formats.py)
    levels: the levels of the listed tasks: `agentgym` for the 18 that AgentGym trains and tests on, `all` for all 40
    style: `full` explains everything and lists the actions, `compact` is for small models, `compat` has AgentGym's
        words, `agentgym` has the same words without the rules, for AgentGym's clients
    max_observation_chars: bound of every observation; a first observation that does not fit is a ConfigError
    """

    env_id = "babyai"
    commands = COMMANDS
    version = f"2 minigrid=={MINIGRID}"

    @validate_call
    def __init__(
        self,
        *,
        format: WrittenFormat = "react",
        levels: Levels = "agentgym",
        style: Style = "full",
        max_observation_chars: Chars = MAX_OBSERVATION_CHARS,
    ) -> None:
        super().__init__(format, max_observation_chars)
        self._style: Style = style

    @classmethod
    @validate_call
    def tasks(cls, *, levels: Levels = "agentgym") -> Sequence[TaskSpec]:
        """Return the tasks by number: 810 train and 90 test tasks of AgentGym's levels, 1,800 and 200 of all levels."""
        return load_tasks(levels)

    @classmethod
    def prepare(cls, *, levels: Levels = "agentgym") -> bool:
        """Draw a listed level ahead of need. Those of AgentGym take 1.3 s in all, and 4 MB."""
        return draw_ahead(levels)

    async def start(self, task_id: str) -> tuple[str, GridWorld]:
        """Begin a mission. Any of AgentGym's numbers is valid, listed or not."""
        if not is_number(task_id):
            raise ConfigError(
                f"babyai has no task {task_id[:80]!r}: a task is a number, such as '1804'"
            )
        make = AgentGymWorld if self._style in ("compat", "agentgym") else GridWorld
        # Where the level is there already, the thread would take longer than the work.
        world = make(task_id) if is_drawn(task_id) else await in_thread(make, task_id)
        return first_observation(world, self._style, self._format), world

    def read(self, text: str) -> str | Unreadable:
        """Return the action that a reply names. AgentGym's client sends an empty one for a reply without."""
        action = super().read(text)
        return "" if isinstance(action, Unreadable) and self._style == "agentgym" else action

    async def follow(self, game: GridWorld, action: str) -> Step:
        """Take an action."""
        return self._show(game, *game.follow(action))

    def refuse(self, game: GridWorld, reason: str) -> Step:
        """Answer a reply that names no action."""
        return self._show(game, *game.reject(reason))

    def _show(self, world: GridWorld, outcome: Outcome, answer: str) -> Step:
        return Step(
            observation(world, answer, self._style),
            reward=outcome.reward,
            terminated=outcome.terminated,
            truncated=outcome.truncated,
            success=outcome.terminated and outcome.reward > 0,
            info={"steps": world.steps},
        )

    def state(self) -> str:
        """Return the grid, where the agent stands in it, what it carries, and which parts of the mission are done."""
        return self._current().state

    def expert(self) -> MoveExpert:
        """Return an expert that continues from the present state of the episode."""
        world = self._current()
        return self._expert(lambda observation: next_move(world))
