"""TextCraft: craft an item from the recipes that are shown. The reward is 1 when the goal is crafted, else 0.

The rules and the tasks are those of the published environment, and the engine is our own
(docs/environments/textcraft.md lists the differences). A step takes microseconds, so it needs no thread.
"""

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field, validate_call

from horizonrl.common.errors import ConfigError
from horizonrl.envs.api import Expert, Step, TaskSpec
from horizonrl.envs.formats import ActionFormat
from horizonrl.envs.game import Style, TurnEnvironment, refuse_move
from horizonrl.envs.text_limits import MAX_OBSERVATION_CHARS, Chars
from horizonrl.envs.worlds.textcraft.agentgym import AgentGymCrafting
from horizonrl.envs.worlds.textcraft.crafting import COMMANDS, Crafting
from horizonrl.envs.worlds.textcraft.expert import next_move
from horizonrl.envs.worlds.textcraft.prompt import first_observation
from horizonrl.envs.worlds.textcraft.tasks import load_book, load_tasks, make_task_id, parse_goal


class TextCraft(TurnEnvironment[Crafting]):
    """One crafting episode at a time.

    distractors: number of recipes in the first observation that the goal does not need
    format: how the agent names its action (envs/formats.py)
    style: `full` explains the rules and lists every way to the goal, `compact` is for small models and short contexts,
        `agentgym` has AgentGym's words and leaves the rules to its clients
    max_observation_chars: bound of every observation; a first observation that does not fit is a ConfigError
    """

    env_id = "textcraft"
    version = "1"
    commands = COMMANDS

    @validate_call
    def __init__(
        self,
        *,
        distractors: Annotated[int, Field(ge=0, le=100)] = 10,
        format: ActionFormat = "react",
        style: Style = "full",
        max_observation_chars: Chars = MAX_OBSERVATION_CHARS,
    ) -> None:
        super().__init__(format, max_observation_chars)
        self._distractors = distractors
        self._style: Style = style
        self._book = load_book()

    @classmethod
    def tasks(cls) -> Sequence[TaskSpec]:
        """Return the 544 frozen tasks, sorted by id."""
        return load_tasks()

    async def start(self, task_id: str) -> tuple[str, Crafting]:
        """Begin a task with an empty inventory."""
        goal = parse_goal(task_id)
        if goal not in self._book.recipes_of or task_id != make_task_id(goal):
            raise ConfigError(
                f"textcraft has no task {task_id!r}: a task is a craftable item, such as 'oak_planks'"
            )
        text = first_observation(self._book, goal, self._distractors, (self._style, self._format))
        world = AgentGymCrafting if self._style == "agentgym" else Crafting
        return text, world(self._book, goal)

    async def follow(self, game: Crafting, action: str) -> Step:
        """Follow a command."""
        observation = game.follow(action)
        if not game.crafted:
            return refuse_move(observation)
        return Step(observation, reward=1.0, terminated=True, success=True)

    def state(self) -> str:
        """Return what the agent holds."""
        return self._current().state

    def expert(self) -> Expert:
        """Return an expert that continues from the present state of the episode."""
        world = self._current()
        return self._expert(lambda observation: next_move(world))
