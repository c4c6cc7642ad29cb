"""Gymnasium: any registered environment whose observations and actions are texts, or that a wrapper makes so.

A task is `seed-NUMBER`. Gymnasium has no environments of text itself, so `id` names one of another package.
"""

from collections.abc import Sequence
from typing import Any

from pydantic import validate_call

from horizonrl.common.errors import ConfigError
from horizonrl.common.plugins import load_function
from horizonrl.envs.api import Step, TaskSpec
from horizonrl.envs.formats import ActionFormat, Command
from horizonrl.envs.game import refuse_move
from horizonrl.envs.hubs.hub import HubEnvironment, TaskCount
from horizonrl.envs.hubs.packages import hub_module, hub_version, quiet
from horizonrl.envs.splits import hashed_split
from horizonrl.envs.text_limits import MAX_OBSERVATION_CHARS, Chars

PACKAGE = "gymnasium"
COMMANDS = (Command("say", "{text}", "send a text to the environment"),)
SOLVED = ("success", "is_success", "won")
"""Keys of `info` by which environments say that a task is solved."""


class TextEpisode:
    """One episode of a Gymnasium environment of texts."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._total = 0.0

    def follow(self, action: str) -> Step:
        """Take a step. A text outside of the action space is answered here, and changes nothing."""
        space = self._environment.action_space
        if not space.contains(action):
            return refuse_move(f"That is no action here: an action is {space}.")
        observation, reward, terminated, truncated, info = self._environment.step(action)
        self._total += float(reward)
        solved = next((bool(info[key]) for key in SOLVED if key in info), self._total > 0)
        return Step(
            str(observation),
            reward=float(reward),
            terminated=bool(terminated),
            truncated=bool(truncated) and not terminated,
            success=bool(terminated) and solved,
        )

    def close(self) -> None:
        self._environment.close()


class GymnasiumText(HubEnvironment[TextEpisode]):
    """One episode at a time of the environment `id`.

    id: a registered id, such as `my_package:MyText-v0`; the part before the colon is imported first
    wrapper: `module:function`, called with the environment, for one whose spaces are not texts
    tasks: how many seeds are listed
    format: how the agent names its action (envs/formats.py)
    max_observation_chars: bound of every observation; a first observation that does not fit is a ConfigError
    """

    env_id = "gymnasium"
    version = hub_version(1, PACKAGE)
    commands = COMMANDS

    @validate_call
    def __init__(
        self,
        *,
        id: str | None = None,
        wrapper: str | None = None,
        tasks: TaskCount = 100,
        format: ActionFormat = "react",
        max_observation_chars: Chars = MAX_OBSERVATION_CHARS,
    ) -> None:
        super().__init__(format, max_observation_chars)
        self._id, self._wrapper = _require(id), wrapper
        self.version = f"{type(self).version} {id} {wrapper or ''} tasks:{tasks}"
        self._make().close()  # an id or wrapper that does not work is a ConfigError now, not in the first episode

    @classmethod
    @validate_call
    def tasks(cls, *, id: str | None = None, tasks: TaskCount = 100) -> Sequence[TaskSpec]:
        """Return the first seeds, in the category of the id."""
        category = _require(id).rpartition(":")[2].rpartition("/")[2]
        return tuple(
            TaskSpec(task, hashed_split(task), category)
            for task in (f"seed-{n}" for n in range(tasks))
        )

    def begin(self, task_id: str) -> tuple[str, TextEpisode]:
        """Make an environment and reset it with the task's seed."""
        _, seed = self.parse_id(task_id, ("seed",))
        environment = self._make()
        observation, _ = environment.reset(seed=seed)
        return f"{observation}\n\n{self.manual()}", TextEpisode(environment)

    def _make(self) -> Any:
        """Return an environment of texts. Raises ConfigError if it cannot be made or has other spaces."""
        gymnasium = hub_module("gymnasium")
        try:
            with quiet():
                # Its checkers warn of what a text environment does on purpose.
                environment = gymnasium.make(self._id, disable_env_checker=True)
                if self._wrapper:
                    wrap = load_function("options.wrapper", self._wrapper, "environment")
                    environment = wrap(environment)
        except (gymnasium.error.Error, ImportError, AttributeError, TypeError, ValueError) as error:
            raise ConfigError(
                f"gymnasium cannot make id {self._id!r} with wrapper {self._wrapper!r} ({error}): id is a "
                "registered id, such as my_package:MyText-v0, and wrapper is module:function"
            ) from error
        spaces = (environment.observation_space, environment.action_space)
        if not all(isinstance(space, gymnasium.spaces.Text) for space in spaces):
            environment.close()
            raise ConfigError(
                f"gymnasium's {self._id!r} has the spaces {spaces[0]} and {spaces[1]}, and both must be Text: set "
                "options.wrapper to a module:function that makes them texts"
            )
        return environment


def _require(id: str | None) -> str:
    if not id:
        raise ConfigError(
            "gymnasium needs an environment: set options.id, such as my_package:MyText-v0"
        )
    return id
