"""`horizonrl envs serve`: environments over AgentGym's HTTP protocol, for AgentGym's clients and ours.

    /ID/...         for AgentGym's clients, in the dialect of the environment's counterpart (agentgym/doors.py);
                    if only one id is served, also at the root
    /ID/served/...  for our client `served`: whole replies, task ids, success and truncation
    /ID/tasks       the tasks with their numbers
    /ID/ws          OpenEnv's WebSocket (openenv.py)
    /healthz /readyz /metrics

An error is a status with {"error", "code"}. `compatible` replaces the status by AgentGym's 200.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from aiohttp import web

from horizonrl.common.errors import ConfigError
from horizonrl.common.lag import LoopLag
from horizonrl.common.metrics import Metrics
from horizonrl.common.service import Service, until_stopped
from horizonrl.common.texts import read_object
from horizonrl.envs import registry
from horizonrl.envs.agentgym.dialects import SERVED, Dialect, part_actions
from horizonrl.envs.agentgym.doors import make_door, number_tasks, task_named, vocabulary
from horizonrl.envs.agentgym.wire import KEY_HEADER, REPEATABLE_HEADER
from horizonrl.envs.serving.episodes import STATUS, Episodes, Refusal, Way
from horizonrl.envs.serving.guard import guard_handler, list_names
from horizonrl.envs.serving.hosts import LocalHost, WorkerHost
from horizonrl.envs.serving.openenv import converse

STOP_S = 10.0
HEADERS = {REPEATABLE_HEADER: "1", "Content-Type": "application/json"}


@dataclass(frozen=True, slots=True)
class Serving:
    """What is served, and how."""

    environments: Mapping[str, Mapping[str, Any]]
    """The options of each environment, by id."""
    host: str = "127.0.0.1"
    port: int = 0
    workers: int = 0
    """Number of worker processes per environment. 0 plays in the server's process."""
    capacity: int = 1024
    """The most concurrent episodes per environment."""
    ttl_s: float = 1800.0
    """An episode that is not called for this long is closed."""
    compatible: bool = False
    """Answer errors with status 200, as AgentGym's servers do."""
    hosts: Sequence[str] = ()
    """Further host names by which clients may call the server, such as a Kubernetes service name."""


async def serve(serving: Serving, say: Callable[[str], None] = lambda _: None) -> None:
    """Serve until SIGTERM or SIGINT. Calls `say` with the address of each environment."""
    metrics, lag = Metrics("server", serving.environments), LoopLag()
    served = [await _serve_one(env_id, serving, metrics) for env_id in serving.environments]
    names = list_names(serving.host) | {name.lower() for name in serving.hosts}
    routes = [
        web.route(route.method, route.path, guard_handler(route.handler, names))
        for one in served
        for route in one.routes(serving)
    ]
    refresh = lambda: metrics.set("event_loop_lag_seconds", lag.take())  # noqa: E731
    service = Service(metrics=metrics, stop_within_s=STOP_S, routes=routes, refresh=refresh)

    async def work() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(lag.watch())
            for one in served:
                group.create_task(one.episodes.reap(serving.ttl_s))

    try:
        async with service.open(serving.host, serving.port):
            for one in served:
                say(f"{one.env_id}: http://{serving.host}:{service.port}/{one.env_id}")
            service.ready = True
            await until_stopped(work(), service.stopping)
    finally:
        for one in served:
            await one.stop()


async def _serve_one(env_id: str, serving: Serving, metrics: Metrics) -> "_Served":
    """Return an environment with the ways into it. Raises ConfigError for invalid options."""
    registry.require_steps(env_id)
    options = serving.environments[env_id]
    closing, door = await _way(env_id, options, serving, closes=True), make_door(env_id, options)
    agentgym = (
        await _way(env_id, door.options, serving, closes=door.dialect.closes) if door else None
    )
    return _Served(
        Episodes(env_id, serving.capacity, metrics),
        closing,
        door.dialect if door else SERVED,
        agentgym or closing,
    )


async def _way(env_id: str, options: Mapping[str, Any], serving: Serving, closes: bool) -> Way:
    # Which rejects invalid options, not the first call.
    if await registry.offers_tools(env_id, options):
        raise ConfigError(
            f"{env_id} would be played by calling tools, which are not served: use another `format`"
        )
    host = (
        WorkerHost(env_id, options, serving.workers)
        if serving.workers
        else LocalHost(env_id, options)
    )
    tasks = registry.tasks(env_id, options)
    return Way(host, options, tasks, task_named(env_id, tasks), closes)


@dataclass(frozen=True, slots=True)
class _Served:
    """One environment, and the ways into it."""

    episodes: Episodes
    closing: Way
    """For our own client: the user's options, and whole replies."""
    dialect: Dialect
    agentgym: Way
    """For AgentGym's clients, in the dialect. The same as `own` if AgentGym does not have the environment."""

    @property
    def env_id(self) -> str:
        return self.episodes.env_id

    async def stop(self) -> None:
        for way in (self.closing, self.agentgym):
            await way.host.stop()

    def routes(self, serving: Serving) -> Sequence[web.RouteDef]:
        """Return the routes below the id and, if it is the only environment, also at the root."""
        bases = [f"/{self.env_id}", *([""] if len(serving.environments) == 1 else [])]
        return [route for base in bases for route in self._routes(base, serving.compatible)]

    def _routes(self, base: str, compatible: bool) -> Sequence[web.RouteDef]:
        numbers = number_tasks(self.env_id, self.closing.tasks)
        tasks = [{**asdict(task), "number": numbers[task.task_id]} for task in self.closing.tasks]

        async def list_tasks(_: web.Request) -> web.Response:
            return web.json_response(tasks)

        async def greet(_: web.Request) -> web.Response:
            return web.json_response(f"This is environment {self.env_id}.")

        async def talk(request: web.Request) -> web.WebSocketResponse:
            return await converse(request, self.episodes, self.closing)

        return [
            *DialectRoutes(self.episodes, self.agentgym, self.dialect, compatible).routes(base),
            *DialectRoutes(self.episodes, self.closing, SERVED, compatible).routes(
                base + SERVED.prefix
            ),
            web.get(base or "/", greet),
            web.get(f"{base}/tasks", list_tasks),
            web.get(f"{base}/ws", talk),
        ]


@dataclass(frozen=True)
class DialectRoutes:
    """The HTTP routes of one way into an environment, in one dialect."""

    episodes: Episodes
    way: Way
    dialect: Dialect
    compatible: bool

    def routes(self, base: str) -> list[web.RouteDef]:
        """Return the routes that AgentGym's clients call, and its servers' `detail`."""
        posts = {
            "create": self._create,
            "reset": self._reset,
            "step": self._step,
            "close": self._close,
        }
        gets = {"observation": self._observation, "detail": self._detail}
        if self.dialect.name == "alfworld":
            gets["available_actions"] = self._available_actions
        if self.dialect.name == "wordle":
            gets["filtered_vocab"] = self._vocabulary
        return [
            *(
                web.post(f"{base}/{name}", self._answering(name, call))
                for name, call in posts.items()
            ),
            *(
                web.get(f"{base}/{name}", self._answering(name, call))
                for name, call in gets.items()
            ),
        ]

    def _answering(
        self, name: str, call: Callable[[web.Request], Awaitable[Any]]
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        env_id, metrics = self.episodes.env_id, self.episodes.metrics

        async def answer(request: web.Request) -> web.Response:
            metrics.count("served_calls_total", env=env_id, call=name)
            status, headers = 200, HEADERS
            try:
                body = await call(request)
            except Refusal as refusal:
                metrics.count("served_refusals_total", env=env_id, reason=refusal.code)
                status, body = STATUS[refusal.code], {"error": str(refusal), "code": refusal.code}
                headers = HEADERS | ({"Retry-After": "1"} if status == 429 else {})
            return web.Response(
                body=json.dumps(body).encode(),
                status=200 if self.compatible else status,
                headers=headers,
            )

        return answer

    async def _create(self, _: web.Request) -> Any:
        return self.dialect.write_created(await self.episodes.create(self.way))

    async def _reset(self, request: web.Request) -> Any:
        body = await _body(request)
        task = body.get("task_id", body.get(self.dialect.task))
        if isinstance(task, bool) or not isinstance(task, int | str | None):
            raise Refusal("bad_request", f"{self.dialect.task} is {task!r}: a task is a number")
        if task is None and self.dialect.needs_task:
            raise Refusal(
                "bad_request", f"the body has no {self.dialect.task}: it is the number of the task"
            )
        episode = self._episode(body)
        return self.dialect.write_reset(episode, await self.episodes.reset(episode, task))

    async def _step(self, request: web.Request) -> Any:
        body = await _body(request)
        text = body.get(self.dialect.action)
        if not isinstance(text, str):
            raise Refusal("bad_request", f"{self.dialect.action} is {text!r}: it is a text")
        taken = await self.episodes.step(self._episode(body), text, request.headers.get(KEY_HEADER))
        return self.dialect.write_step(taken.step, taken.total)

    async def _close(self, request: web.Request) -> Any:
        return self.dialect.closed(await self.episodes.close(self._episode(await _body(request))))

    async def _observation(self, request: web.Request) -> Any:
        return self.dialect.write_observation(
            self.episodes.observation(self._episode(request.query))
        )

    async def _detail(self, request: web.Request) -> Any:
        episode = self._episode(request.query)
        last = self.episodes.last(episode)
        if last is not None:
            return self.dialect.write_step(last.step, last.total) | {"deleted": False}
        text = self.dialect.write_observation(self.episodes.observation(episode))
        return {"observation": text, "reward": 0, "score": 0, "done": False, "deleted": False}

    async def _available_actions(self, request: web.Request) -> Any:
        return part_actions(self.episodes.observation(self._episode(request.query)))[1]

    async def _vocabulary(self, request: web.Request) -> Any:
        self._episode(request.query)
        return vocabulary(self.way.options)

    def _episode(self, body: Mapping[str, Any]) -> int:
        episode = body.get(self.dialect.key)
        # A query holds texts. An id has 16 digits at most, and `int` raises for more than 4,300.
        if isinstance(episode, str) and episode.isdecimal() and len(episode) < 20:
            episode = int(episode)
        if isinstance(episode, bool) or not isinstance(episode, int):
            raise Refusal(
                "bad_request",
                f"{self.dialect.key} is {episode!r}: it is the number that /create answered",
            )
        return episode


async def _body(request: web.Request) -> dict[str, Any]:
    if (body := read_object(await request.read())) is None:
        raise Refusal("bad_request", "the body is no JSON object")
    return body
