"""The environment seam: an asynchronous, Gymnasium-shaped protocol over text.

An environment instance runs one episode at a time, and the same task always gives the same episode. An environment that
fails raises EnvironmentFailure. It never reports its own failure as a reward of 0, because that would teach the policy
that its actions were bad (docs/invariants.md, "Broken is not zero").
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol, runtime_checkable

from horizonrl.common.errors import EnvironmentFailure

Split = Literal["train", "test"]


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """A task as its environment lists it."""

    task_id: str
    split: Split
    category: str
    """The group under which results are reported: `depth1`, `GoTo`, `Measure`."""


@dataclass(frozen=True, slots=True)
class Observation:
    """The first text of an episode: the rules and the task."""

    text: str


@dataclass(frozen=True, slots=True)
class Step:
    observation: str
    reward: float
    terminated: bool
    """The task is over: solved, failed or given up."""
    truncated: bool = False
    """The environment's own limit ended the episode."""
    success: bool = False
    """The task is solved. Only meaningful if `terminated`."""
    info: dict[str, str | int | float | bool] = field(default_factory=dict)


class Expert(Protocol):
    """Plays a task without a model. Experts produce demonstrations and prove that a task can be solved."""

    def act(self, observation: str) -> str:
        """Return the reply that an agent should give to the observation."""


class Environment(Protocol):
    """Plays one episode at a time: `reset`, then `step` until the episode ends, then `reset` again or `close`.

    A class that only replays recorded episodes sets `demonstrations_only = True`, since no policy can play it.
    """

    env_id: ClassVar[str]
    version: str
    """Identifies the task list and the rules. Every group records it in its provenance.

    If options choose the tasks, the instance's version identifies those tasks too.
    """

    @classmethod
    def tasks(cls) -> Sequence[TaskSpec]:
        """Return every task, always in the same order.

        Options of the environment that choose the tasks are keyword arguments of this method too, with defaults.
        """

    async def reset(self, task_id: str) -> Observation:
        """Begin a task. Raises ConfigError if the task does not exist, EnvironmentFailure if it cannot begin."""

    async def step(self, text: str) -> Step:
        """Answer the agent's text. If it names no valid action, the observation says so.

        Every text is a legal input: none raises, and none takes long, because other episodes wait in the same event
        loop. Rollouts and servers pass on at most `bounds.MAX_REPLY_CHARS` characters.
        Raises EnvironmentFailure before `reset` and after the end, so that a reward is paid only once.
        """

    async def close(self) -> None:
        """Release all resources. Calling it again does nothing."""


# Checked with isinstance, so that an environment of another package needs no base class of ours.
@runtime_checkable
class Demonstrates(Protocol):
    """An environment that has an expert. One without can be used for RL, but not for imitation."""

    def expert(self) -> Expert:
        """Return an expert for the current task. Raises EnvironmentFailure before `reset`."""


class Prepares(Protocol):
    """An environment that can do ahead of need what its resets would wait for, such as drawing levels.

    The worker processes of a server (`envs serve --workers`) call it while nobody calls them.
    """

    @classmethod
    def prepare(cls) -> bool:
        """Do a piece of the work, in a thread, and return whether there is more.

        A piece takes at most about 100 ms, except for what must start at once, and all of them take bounded memory.
        Options of the environment that matter are keyword arguments of this method too, with defaults.
        """


def expert_of(environment: Environment) -> Expert:
    """Return an environment's expert for the current task. Raises EnvironmentFailure if it has none."""
    if not isinstance(environment, Demonstrates):
        raise EnvironmentFailure(
            f"{environment.env_id} has no expert: use transcripts as demonstrations, or train without imitation"
        )
    return environment.expert()
