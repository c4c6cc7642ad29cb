"""The episodes of one environment on a server: who may make which call, one call at a time, and when episodes expire.

Knows nothing about HTTP. A rejected call raises a Refusal with a code, and so does a failure of the environment.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from horizonrl.common.errors import ConfigError, HorizonError
from horizonrl.common.logs import get_logger
from horizonrl.common.metrics import Metrics
from horizonrl.envs.api import Step, TaskSpec
from horizonrl.envs.serving.hosts import Host
from horizonrl.envs.text_limits import readable

log = get_logger()

CLOSE_S = 10.0
BEGIN_WITHIN_S = 120.0
"""An episode that is created but never begun is closed after this time, because a client can create them for free."""
LEFT_AFTER_S = 300.0
"""If the server is full, it may close an episode that a client which never closes has not called for this long."""
STATUS = {"bad_request": 400, "unknown_task": 400, "unknown_episode": 404, "no_episode": 409, "full": 429,
          "environment_failed": 500, "environment_timeout": 504}  # fmt: skip
"""The HTTP status of each refusal code."""


class Refusal(HorizonError):
    """A rejected call. `code` gives programs the reason."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class StepResult:
    """A step, and the sum of the episode's rewards including this step."""

    step: Step
    total: float


@dataclass(frozen=True)
class Way:
    """One way into an environment: where it is played, with which options, and which task a number stands for."""

    host: Host
    options: Mapping[str, Any]
    tasks: Sequence[TaskSpec]
    task_named: Callable[[int], str | None]
    closes: bool = True
    """Whether clients close their episodes. Some of AgentGym's clients do not, even in the middle of an episode."""

    @cached_property
    def task_ids(self) -> frozenset[str]:
        return frozenset(task.task_id for task in self.tasks)


@dataclass
class _Episode:
    way: Way
    used_at: float
    task_id: str
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    observation: str = ""
    begun: bool = False
    """A task has been begun at least once."""
    going: bool = False
    """A task has begun and is not over."""
    total: float = 0.0
    closed: bool = False
    last_key: str | None = None
    last: StepResult | None = None

    def is_left(self, now: float) -> bool:
        """Whether the client has probably left the episode: it is over, or has not been called for LEFT_AFTER_S."""
        over = self.last is not None and not self.going
        return not self.lock.locked() and (
            over or (not self.way.closes and self.used_at < now - LEFT_AFTER_S)
        )


class Episodes:
    """Creates, plays and closes the episodes of one environment, for every way into it.

    Ids are random 53-bit numbers, so that no client can guess the id of another one.
    """

    def __init__(self, env_id: str, capacity: int, metrics: Metrics) -> None:
        self.env_id = env_id
        self._capacity = capacity
        self.metrics = metrics
        self._episodes: dict[int, _Episode] = {}

    async def create(self, way: Way) -> int:
        """Create an episode without a task and return its id.

        A full server first closes the episode that its client left the longest ago.
        """
        if len(self._episodes) >= self._capacity:
            now = time.monotonic()
            abandoned = {
                key: episode.used_at
                for key, episode in self._episodes.items()
                if episode.is_left(now)
            }
            if not abandoned:
                raise Refusal(
                    "full",
                    f"the server holds {self._capacity} episodes of {self.env_id}: close one, or wait",
                )
            await self.close(min(abandoned, key=abandoned.__getitem__))
        # 53 bits, because a JavaScript client reads ids as doubles.
        episode_id = secrets.randbits(53)
        self._episodes[episode_id] = _Episode(way, time.monotonic(), way.tasks[0].task_id)
        self._count()
        return episode_id

    async def reset(self, episode_id: int, task: int | str | None) -> str:
        """Begin a task, given by its id or its number. None begins the last task again."""
        episode = self._find(episode_id)
        task_id = episode.task_id if task is None else self._task_id(episode, task)
        async with self._held(episode_id, episode):
            # Not going until the environment has answered: no step is taken in what a failed reset leaves.
            episode.going, episode.task_id, episode.last_key, episode.total = (
                False,
                task_id,
                None,
                0.0,
            )
            episode.last = None
            async with _attributed():
                episode.observation = await episode.way.host.reset(episode_id, task_id)
            episode.going = episode.begun = True
            return episode.observation

    async def step(self, episode_id: int, text: str, key: str | None = None) -> StepResult:
        """Take a step. A repeated key gets the first answer again, and the step is not taken twice."""
        episode = self._find(episode_id)
        started = time.monotonic()
        async with self._held(episode_id, episode):
            # Before the check of `going`: the repeat of the last step of an episode is answered too.
            if key is not None and key == episode.last_key and episode.last is not None:
                return episode.last
            if not episode.going:
                raise Refusal("no_episode", "no episode is in progress: reset before the next step")
            episode.going = False  # stays False if the environment does not answer
            async with _attributed():
                step = await episode.way.host.step(episode_id, readable(text))
            episode.observation, episode.total = step.observation, episode.total + step.reward
            episode.going = not (step.terminated or step.truncated)
            episode.last_key, episode.last = key, StepResult(step, episode.total)
            self.metrics.observe("served_step_seconds", time.monotonic() - started, env=self.env_id)
            return episode.last

    def observation(self, episode_id: int) -> str:
        """Return the last observation."""
        return self._find(episode_id).observation

    def last(self, episode_id: int) -> StepResult | None:
        """Return the last step, or None before the first."""
        return self._find(episode_id).last

    async def close(self, episode_id: int) -> bool:
        """Close an episode, or let its call in progress close it. Returns whether it existed."""
        # Removed first, so that no call finds it while its environment closes.
        episode = self._episodes.pop(episode_id, None)
        if episode is None:
            return False
        self._count()
        episode.closed = True
        if not episode.lock.locked():
            await self._release(episode_id, episode)
        return True

    @asynccontextmanager
    async def _held(self, episode_id: int, episode: _Episode) -> AsyncIterator[None]:
        """Hold an episode for one call. If it is closed meanwhile, its environment is closed after the call."""
        async with episode.lock:
            self._find(episode_id)  # it may have been closed while this call waited
            try:
                yield
            finally:
                if episode.closed:
                    await self._release(episode_id, episode)

    async def _release(self, episode_id: int, episode: _Episode) -> None:
        try:
            async with asyncio.timeout(CLOSE_S):
                await episode.way.host.close(episode_id)
        except Exception as error:  # noqa: BLE001 - the episode is over, so a failed close is only logged
            log.warning("environment_not_closed", env=self.env_id, error=repr(error))

    async def reap(self, ttl_s: float) -> None:
        """Close episodes that have not been called for `ttl_s`. Runs for ever."""
        while True:
            # Ten looks within a limit: no episode lives more than a tenth longer than allowed.
            await asyncio.sleep(min(ttl_s, BEGIN_WITHIN_S) / 10)
            now = time.monotonic()
            for episode_id, episode in list(self._episodes.items()):
                limit_s = ttl_s if episode.begun else min(ttl_s, BEGIN_WITHIN_S)
                # A call in progress keeps its episode: it has a deadline of its own (`hosts.CALL_S`).
                if episode.used_at < now - limit_s and not episode.lock.locked():
                    log.info(
                        "episode_expired",
                        env=self.env_id,
                        idle_s=round(time.monotonic() - episode.used_at),
                    )
                    await self.close(episode_id)

    def _find(self, episode_id: int) -> _Episode:
        episode = self._episodes.get(episode_id)
        if episode is None:
            raise Refusal(
                "unknown_episode",
                f"no episode {episode_id}: it was closed, has expired or never was",
            )
        episode.used_at = time.monotonic()
        return episode

    def _task_id(self, episode: _Episode, task: int | str) -> str:
        if isinstance(task, str) and task in episode.way.task_ids:
            return task
        named = episode.way.task_named(task) if isinstance(task, int) and task >= 0 else None
        if named is None:
            raise Refusal(
                "unknown_task",
                f"{self.env_id} has no task {task!r}: GET /{self.env_id}/tasks lists them",
            )
        return named

    def _count(self) -> None:
        self.metrics.set("served_episodes", len(self._episodes), env=self.env_id)


@asynccontextmanager
async def _attributed() -> AsyncIterator[None]:
    """Turn whatever an environment raises into a Refusal that says whether the call or the environment failed."""
    try:
        yield
    except TimeoutError as error:
        raise Refusal(
            "environment_timeout", str(error) or "the environment's own deadline has passed"
        ) from None
    except ConfigError as error:
        raise Refusal("bad_request", str(error)) from None
    except (
        Exception
    ) as error:  # environments may be third-party code, and their failure only breaks the episode
        raise Refusal("environment_failed", f"{type(error).__name__}: {error}") from error
