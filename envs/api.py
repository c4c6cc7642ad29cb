"""The environment seam: an asynchronous, Gymnasium-shaped protocol over text.

An environment instance runs one episode at a time, and the same task always gives the same episode. An environment that
fails raises EnvironmentFailure. It never reports its own failure as a reward of 0, because that would teach the policy
that its actions were bad (docs/invariants.md, "Broken is not zero").
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import xxhash

from horizonrl.common.errors import EnvironmentFailure

Split = Literal["train", "validation", "test"]
"""To train on, to choose by (a recipe, a rate, a version), or to play once for a result."""
Tools = tuple[Mapping[str, Any], ...]
"""In OpenAI's form: {"type": "function", "function": {"name", "description", "parameters": a JSON schema}}."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """An agent's call of a tool."""

    name: str
    arguments: str
    """JSON text, as it was written."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What an agent answers: a text, and the tools that it calls, in order."""

    text: str
    calls: tuple[ToolCall, ...] = ()


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


@runtime_checkable
class CallsTools(Protocol):
    """An expert that can act by calling tools, in an environment that offers them."""

    def reply(self, observation: str) -> Reply:
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
        loop. Rollouts and servers pass on at most `text_limits.MAX_REPLY_CHARS` characters.
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


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where one episode's program finds the policy, as OpenAI's clients take it."""

    base_url: str
    key: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a program's run is worth."""

    reward: float
    success: bool
    truncated: bool = False
    """The environment's own limit ended the run."""


@runtime_checkable
class Program(Protocol):
    """An environment that drives itself: it calls the policy at an endpoint, as often and in whatever order it likes.

    It has `env_id`, `version`, `tasks` and `close` as an Environment has them, and these two methods for `reset` and
    `step`. The horizon counts its calls of the policy.
    """

    async def drive(self, task_id: str, endpoint: Endpoint) -> None:
        """Play the task until the program ends by itself. Cancelling it ends the program.

        Raises EnvironmentFailure for a program that crashed, EnvironmentTimeout for one that took too long.
        """

    async def grade(self, finished: bool) -> Outcome:
        """Return what the run is worth; `finished` says that the program ended by itself.

        Raises EnvironmentFailure if nobody can tell. Only the grader decides: a crash is never a reward of 0.
        """

    async def close(self) -> None: ...


@runtime_checkable
class OffersTools(Protocol):
    """An environment whose agent can act by calling tools, in the syntax of the model's own chat template.

    `step` then answers a reply that calls none.
    """

    native: bool
    """Whether it is played that way. Its options decide, once and for all."""

    def tools(self) -> Tools:
        """Return the tools of the present episode."""

    async def call(self, call: ToolCall) -> Step:
        """Answer one call; the observation is the tool's result.

        Every call is a legal input, as every text is for `step`: if it names no tool, or its arguments do not fit, the
        result says so.
        """


@runtime_checkable
class NamesState(Protocol):
    """An environment that tells whether two episodes of a task are at the same point (`advantage.state_weight`)."""

    def state(self) -> str:
        """Return a text that two episodes of a task share if the same actions have the same results from here on.

        How many turns are left is no part of it: GiGPO compares a state that is visited again with its first visit.
        Of any length, since only its digest travels. Called between `reset` and the end, before each turn.
        """


class Wraps(Protocol):
    """An environment that another one plays in. Whether it has an expert or names its states is the other's to say."""

    @classmethod
    def wrapped(cls) -> tuple[str, Mapping[str, Any]]:
        """Return the other environment's id and options.

        Options of the environment that matter are keyword arguments of this method too, with defaults.
        """


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


def make_expert(environment: Environment) -> Expert:
    """Return an environment's expert for the current task. Raises EnvironmentFailure if it has none."""
    if not isinstance(environment, Demonstrates):
        raise EnvironmentFailure(
            f"{environment.env_id} has no expert: use transcripts as demonstrations, or train without imitation"
        )
    return environment.expert()


def state_digest(environment: Environment) -> str:
    """Return the digest of the state that the next turn is taken in; empty if the environment names none.

    Raises EnvironmentFailure if what it names is no text.
    """
    if not isinstance(environment, NamesState):
        return ""
    named = environment.state()
    if not isinstance(named, str):
        raise EnvironmentFailure(
            f"state() returned {type(named).__name__}: return a text, such as its repr"
        )
    return xxhash.xxh3_64_hexdigest(named.encode())


def tool_user(environment: Environment) -> OffersTools | None:
    """Return the environment if its agent acts by calling tools."""
    return environment if isinstance(environment, OffersTools) and environment.native else None
