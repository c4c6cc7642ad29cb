"""The environment's seam: a Gymnasium-shaped asynchronous protocol over text.

An environment instance runs one episode at a time. It holds its own random generator, is deterministic for a task,
and reports a failure of its own by raising EnvironmentFailure: never as a reward of zero (invariant 5).
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
    """What results are broken down by: `depth1`, `GoTo`, `Measure`."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What the agent reads first: the rules and the task."""

    text: str


@dataclass(frozen=True, slots=True)
class Step:
    observation: str
    reward: float
    terminated: bool
    """The task is over: solved, failed or given up."""
    truncated: bool = False
    """The environment's own limit cut the episode."""
    success: bool = False
    """The task is solved; meaningful when terminated."""
    info: dict[str, str | int | float | bool] = field(default_factory=dict)


class Expert(Protocol):
    """Plays a task without a model: the source of demonstrations and of proof that a task can be solved."""

    def act(self, observation: str) -> str:
        """Return the text that an agent should answer the observation with."""


class Environment(Protocol):
    """One episode at a time: `reset`, then `step` until it has ended, then `reset` again or `close`.

    A class that only replays what others did says so with `demonstrations_only = True`: no policy can play it.
    """

    env_id: ClassVar[str]
    version: str
    """Names the task list and the rules; recorded in the provenance of every group. Of an instance whose options
    choose the tasks, it names these too."""

    @classmethod
    def tasks(cls) -> Sequence[TaskSpec]:
        """Return every task, always in the same order.

        Where options of the environment choose the tasks, they are keyword arguments here too, and have defaults.
        """

    async def reset(self, task_id: str) -> Observation:
        """Begin a task. Raises EnvironmentFailure, and ConfigError for a task that does not exist."""

    async def step(self, text: str) -> Step:
        """Answer the agent's text. An action that cannot be understood is answered by an observation that says so.

        Whatever an agent writes is an action, readable or not: no text raises, and none takes long, since other
        episodes wait in the same event loop. Rollouts and servers pass on at most `bounds.MAX_REPLY_CHARS` characters.
        Raises EnvironmentFailure before `reset` and after the end: a reward is paid once.
        """

    async def close(self) -> None:
        """Free what the instance holds; harmless when repeated."""


@runtime_checkable
class Demonstrates(Protocol):
    """What an environment may have as well: an expert. Without one it can be trained on, but not imitated."""

    def expert(self) -> Expert:
        """Return an expert for the task begun. Raises EnvironmentFailure before `reset`."""


def expert_of(environment: Environment) -> Expert:
    """Return an environment's expert for the task begun. Raises EnvironmentFailure where it has none."""
    if not isinstance(environment, Demonstrates):
        raise EnvironmentFailure(
            f"{environment.env_id} has no expert: take demonstrations from transcripts, or do without"
        )
    return environment.expert()
