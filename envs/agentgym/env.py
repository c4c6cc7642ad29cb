"""Environments that are played on a server: the client side of AgentGym's HTTP protocol.

`agentgym-webshop` and its fourteen siblings connect to AgentGym's own servers, `served` to `horizonrl envs serve`. Any
failure of the server or the connection is an EnvironmentFailure: the episode is broken, and the run goes on.
"""

from collections.abc import Sequence
from hashlib import sha256
from types import SimpleNamespace
from typing import Annotated, ClassVar

from pydantic import Field, validate_call

from horizonrl.common.errors import ConfigError
from horizonrl.envs import registry
from horizonrl.envs.agentgym.dialects import DIALECTS, SERVED, Dialect
from horizonrl.envs.agentgym.tasks import numbered_tasks
from horizonrl.envs.agentgym.wire import Wire
from horizonrl.envs.api import Step, TaskSpec
from horizonrl.envs.formats import Unreadable
from horizonrl.envs.game import TurnEnvironment
from horizonrl.envs.text_limits import Chars

Seconds = Annotated[float, Field(gt=0)]


class Remote(TurnEnvironment[Wire]):
    """Plays one episode at a time on a server. Subclasses know the tasks and the rules."""

    dialect: ClassVar[Dialect]
    version = "1"

    def __init__(
        self, tasks: Sequence[TaskSpec], instructions: str, wire: Wire, max_chars: int
    ) -> None:
        super().__init__("plain", max_chars)
        self._tasks = {task.task_id for task in tasks}
        self._instructions = instructions
        self._wire = wire
        self._total = 0.0

    async def start(self, task_id: str) -> tuple[str, Wire]:
        """Begin a task on the server."""
        if task_id not in self._tasks:
            raise ConfigError(f"{self.env_id} has no task {task_id!r} among its {len(self._tasks)}")
        self._total = 0.0
        text = await self._wire.begin(task_id if self.dialect is SERVED else int(task_id))
        instructions = self._instructions
        if self.dialect.name == "wordle" and (words := await self._wire.vocabulary()):
            instructions += "\nThe words: " + ", ".join(words)
        return "\n\n".join(filter(None, (instructions, text))), self._wire

    def read(self, text: str) -> str | Unreadable:
        """Return the part of a reply that AgentGym's client would send."""
        return self.dialect.read(text)

    async def follow(self, game: Wire, action: str) -> Step:
        """Send an action, and return its answer as AgentGym's client does."""
        verdict = await game.step(action)
        # The increase, so that the return of an episode is the score that AgentGym's client reports.
        reward = verdict.score - self._total if self.dialect.cumulative else verdict.score
        self._total += reward
        return Step(
            verdict.observation,
            reward=reward,
            terminated=verdict.done and not verdict.truncated,
            truncated=verdict.truncated,
            success=verdict.success,
            info={"score": verdict.score},
        )

    async def close(self) -> None:
        """Release the server's environment."""
        await super().close()
        await self._wire.close()


class AgentGym(Remote):
    """An environment of an AgentGym server.

    url: the server's address, such as http://127.0.0.1:36001
    instructions: the rules that the agent reads first, instead of ours; an empty text for no rules
    train, validation, test: a range of task numbers, or a file with a JSON list of them; without
        `validation`, about one in 16 of the train numbers (docs/environments/agentgym.md)
    mappings: AgentGym's folder `agentenv-alfworld/configs`; needed if a list names ALFRED's trials
    timeout_s: the longest wait for an answer, in seconds
    max_observation_chars: bound of every observation
    """

    @validate_call
    def __init__(
        self,
        *,
        url: str | None = None,
        instructions: str | None = None,
        train: str | None = None,
        validation: str | None = None,
        test: str | None = None,
        mappings: str | None = None,
        timeout_s: Seconds = 300.0,
        max_observation_chars: Chars = 32_768,
    ) -> None:
        tasks = numbered_tasks(self.dialect, train, validation, test, mappings)
        # Two machines with other lists are two versions, which the provenance of every group shows.
        digest = sha256(
            " ".join(f"{task.split} {task.task_id}" for task in tasks).encode()
        ).hexdigest()
        self.version = f"{type(self).version} tasks:{digest[:16]}"
        rules = self.dialect.rules if instructions is None else instructions
        wire = Wire(self.dialect, _require(self.env_id, url), timeout_s)
        super().__init__(tasks, rules, wire, max_observation_chars)

    @classmethod
    @validate_call
    def tasks(
        cls,
        *,
        train: str | None = None,
        validation: str | None = None,
        test: str | None = None,
        mappings: str | None = None,
    ) -> Sequence[TaskSpec]:
        """Return one task for each number of the three splits."""
        return numbered_tasks(cls.dialect, train, validation, test, mappings)


class Served(Remote):
    """An environment behind `horizonrl envs serve`. It must be installed here too, because its tasks are listed here.

    env: the id of the environment
    url: the server's address with its path, such as http://127.0.0.1:36001/textcraft
    timeout_s: the longest wait for an answer, in seconds
    max_observation_chars: bound of every observation
    """

    env_id = "served"
    dialect = SERVED

    @validate_call
    def __init__(
        self,
        *,
        env: str = "textcraft",
        url: str | None = None,
        timeout_s: Seconds = 300.0,
        max_observation_chars: Chars = 32_768,
    ) -> None:
        self.version = f"{env} {registry.load(env).version}"
        wire = Wire(SERVED, _require(self.env_id, url), timeout_s)
        super().__init__(registry.tasks(env), "", wire, max_observation_chars)

    @classmethod
    @validate_call
    def tasks(cls, *, env: str = "textcraft") -> Sequence[TaskSpec]:
        """Return the environment's own tasks."""
        return registry.tasks(env)


def _require(env_id: str, url: str | None) -> str:
    if not url or not url.startswith(("http://", "https://")):
        raise ConfigError(
            f"{env_id} needs the address of its server and got {url!r}: set options.url, such as http://127.0.0.1:36001"
        )
    return url


CLIENTS = SimpleNamespace(
    **{
        name: type(
            f"AgentGym_{name}",
            (AgentGym,),
            {"env_id": f"agentgym-{name}", "dialect": dialect, "__module__": __name__},
        )
        for name, dialect in DIALECTS.items()
    }
)
"""One class for each of the fifteen ids. The entry points refer to these attributes."""
