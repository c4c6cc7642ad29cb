"""TextCraft: craft an item from the recipes that are shown. The reward is 1 when the goal is crafted, else 0.

The rules and the tasks are those of the published environment, and the engine is our own
(docs/environments/textcraft.md lists the differences). A step takes microseconds, so it needs no thread.
"""

from collections.abc import Sequence
from typing import Annotated, ClassVar

from pydantic import Field, validate_call

from horizonrl.common.errors import ConfigError, EnvironmentFailure
from horizonrl.envs.api import Expert, Observation, Step, TaskSpec, ToolCall, Tools
from horizonrl.envs.bounds import MAX_OBSERVATION_CHARS, Chars, clip, whole
from horizonrl.envs.formats import ActionFormat, Unreadable, make_tools, read_action, read_call
from horizonrl.envs.worlds.textcraft.agentgym import AgentGymCrafting
from horizonrl.envs.worlds.textcraft.crafting import COMMANDS, Crafting
from horizonrl.envs.worlds.textcraft.expert import TextCraftExpert
from horizonrl.envs.worlds.textcraft.prompt import Style, first_observation
from horizonrl.envs.worlds.textcraft.tasks import load_book, load_tasks, make_task_id, parse_goal


class TextCraft:
    """One crafting episode at a time.

    distractors: number of recipes in the first observation that the goal does not need
    format: how the agent names its action (envs/formats.py)
    style: `full` explains the rules and lists every way to the goal, `compact` is for small models and short contexts,
        `agentgym` has AgentGym's words and leaves the rules to its clients
    max_observation_chars: bound of every observation; a first observation that does not fit is a ConfigError
    """

    env_id: ClassVar[str] = "textcraft"
    version: str = "1"

    @validate_call
    def __init__(
        self,
        *,
        distractors: Annotated[int, Field(ge=0, le=100)] = 10,
        format: ActionFormat = "react",
        style: Style = "full",
        max_observation_chars: Chars = MAX_OBSERVATION_CHARS,
    ) -> None:
        self._distractors = distractors
        self._format: ActionFormat = format
        self.native = format == "native"
        self._style: Style = style
        self._max_chars = max_observation_chars
        self._book = load_book()
        self._world: Crafting | None = None

    @classmethod
    def tasks(cls) -> Sequence[TaskSpec]:
        """Return the 544 frozen tasks, sorted by id."""
        return load_tasks()

    async def reset(self, task_id: str) -> Observation:
        """Begin a task with an empty inventory."""
        goal = parse_goal(task_id)
        if goal not in self._book.recipes_of or task_id != make_task_id(goal):
            raise ConfigError(
                f"textcraft has no task {task_id!r}: a task is a craftable item, such as 'oak_planks'"
            )
        text = first_observation(self._book, goal, self._distractors, (self._style, self._format))
        text = whole(text, task_id, self._max_chars)
        self._world = (AgentGymCrafting if self._style == "agentgym" else Crafting)(
            self._book, goal
        )
        return Observation(text)

    async def step(self, text: str) -> Step:
        """Follow the one command that the text names."""
        return self._follow(read_action(text, self._format, COMMANDS))

    def tools(self) -> Tools:
        """Return the commands as tools."""
        return make_tools(COMMANDS)

    async def call(self, call: ToolCall) -> Step:
        """Follow the command that a call names."""
        return self._follow(read_call(call, COMMANDS))

    def _follow(self, action: str | Unreadable) -> Step:
        world = self._current()
        if world.crafted:
            raise EnvironmentFailure(
                f"the episode of {world.goal!r} is over: reset before the next step"
            )
        match action:
            case Unreadable(reason):
                observation = reason
            case str(command):
                observation = world.follow(command)
        done = world.crafted
        return Step(
            clip(observation, self._max_chars), reward=float(done), terminated=done, success=done
        )

    def state(self) -> str:
        """Return what the agent holds."""
        return self._current().state

    def expert(self) -> Expert:
        """Return an expert that continues from the present state of the episode."""
        return TextCraftExpert(self._current(), self._format)

    async def close(self) -> None:
        self._world = None

    def _current(self) -> Crafting:
        if self._world is None:
            raise EnvironmentFailure("no episode has begun: reset before step and expert")
        return self._world
