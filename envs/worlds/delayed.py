"""Delayed: another environment whose steps take as long as you say (docs/environments/games.md).

Place in the flow: it stands between the rollout and the environment that it wraps, and changes nothing but the time. So
it shows what slow and uneven environments cost a run, without a slow world to install.
"""

import asyncio
from collections.abc import Sequence
from functools import partial
from hashlib import sha256
from typing import Annotated, Any, ClassVar

from pydantic import Field, validate_call

from horizonrl.common.errors import ConfigError
from horizonrl.envs import registry
from horizonrl.envs.api import Observation, OffersTools, Step, TaskSpec, ToolCall, tool_user
from horizonrl.envs.game import random_for

NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
OFFERED = ("expert", "state", "native", "tools")
"""What an environment may have or not have. An instance has of it what the wrapped one has."""


class Delayed:
    """Plays another environment, and sleeps before each of its steps.

    env: the id of the other environment
    options: its options
    seconds: the median of the delays, in seconds
    sigma: 0 makes all delays equal; above 0 they are log-normal, and their mean is seconds times exp(sigma² / 2)
    seed: another one draws other delays
    """

    env_id: ClassVar[str] = "delayed"
    version: str = "1"

    @validate_call
    def __init__(
        self,
        *,
        env: str | None = None,
        options: dict[str, Any] | None = None,
        seconds: NotNegative = 1.0,
        sigma: NotNegative = 0.0,
        seed: int = 0,
    ) -> None:
        self._environment = registry.make(*self.wrapped(env=env, options=options))
        self.version = f"{self.version} {env} {self._environment.version}"
        self._seconds, self._sigma, self._seed = seconds, sigma, seed
        self._episode = sha256()
        # On the instance: who asks whether it has them (`api.NamesState` and others) is answered for the wrapped one.
        for name in OFFERED:
            if hasattr(self._environment, name):
                setattr(self, name, getattr(self._environment, name))
        if (user := tool_user(self._environment)) is not None:
            self.call = partial(self._call, user)

    @classmethod
    def wrapped(
        cls, *, env: str | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Return the id and the options of the environment that plays. Raises ConfigError if it cannot be delayed."""
        if env is None:
            raise ConfigError(
                'delayed needs an environment to delay: set options.env, such as "textcraft"'
            )
        if env == cls.env_id:
            raise ConfigError(
                "delayed cannot delay itself: set options.env to the environment that plays"
            )
        if registry.drives_itself(env):
            raise ConfigError(f"delayed cannot delay {env!r}, which drives itself: nobody steps it")
        return env, options or {}

    @classmethod
    @validate_call
    def tasks(
        cls, *, env: str | None = None, options: dict[str, Any] | None = None
    ) -> Sequence[TaskSpec]:
        """Return the tasks of the other environment."""
        return registry.tasks(*cls.wrapped(env=env, options=options))

    async def reset(self, task_id: str) -> Observation:
        """Begin a task, without a delay."""
        first = await self._environment.reset(task_id)
        self._episode = sha256(task_id.encode())
        return first

    async def step(self, text: str) -> Step:
        """Sleep, then let the other environment answer."""
        await self._delay(text)
        return await self._environment.step(text)

    async def close(self) -> None:
        await self._environment.close()

    async def _call(self, user: OffersTools, call: ToolCall) -> Step:
        """Sleep, then let the other environment answer the call."""
        await self._delay(f"{call.name} {call.arguments}")
        return await user.call(call)

    async def _delay(self, reply: str) -> None:
        # Task and replies make an episode, and so they make its delays: it repeats in every process, while the
        # episodes of a group, which differ in a reply, are not all slow in the same turn.
        self._episode.update(b"\n" + reply.encode(errors="surrogatepass"))
        draws = random_for(f"{self._seed} {self._episode.hexdigest()}")
        await asyncio.sleep(self._seconds * draws.lognormvariate(0.0, self._sigma))
