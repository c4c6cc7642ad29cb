"""`horizonrl envs serve`: environments over AgentGym's HTTP protocol, so that its clients and ours can play them.

    /ID/...         in AgentGym's words for that id (agentgym/dialects.py); at the root too where one id is served
    /ID/served/...  in our own: whole replies, task ids, success and truncation (the environment `served` plays it)
    /ID/tasks       the tasks, in the order in which AgentGym's numbers count them
    /ID/ws          OpenEnv's WebSocket (openenv.py)
    /healthz /readyz /metrics

An error is a status and {"error", "code"}; `compatible` turns it into AgentGym's 200 with {"error"}.
"""

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from aiohttp import web

from horizonrl.common.lag import LoopLag
from horizonrl.common.metrics import Metrics
from horizonrl.common.service import Service, until_stopped
from horizonrl.envs import registry
from horizonrl.envs.agentgym.dialects import DIALECTS, SERVED, Dialect
from horizonrl.envs.agentgym.wire import KEY_HEADER, REPEATABLE_HEADER
from horizonrl.envs.serving.episodes import STATUS, Episodes, Refusal
from horizonrl.envs.serving.guard import guarded, names_of
from horizonrl.envs.serving.hosts import LocalHost, WorkerHost
from horizonrl.envs.serving.openenv import converse

STOP_S = 10.0
HEADERS = {REPEATABLE_HEADER: "1", "Content-Type": "application/json"}


@dataclass(frozen=True, slots=True)
class Serving:
    """What is served, and how."""

    environments: Mapping[str, Mapping[str, Any]]
    """Options per environment id."""
    host: str = "127.0.0.1"
    port: int = 0
    workers: int = 0
    """Processes for each environment; 0 plays in the server's own."""
    capacity: int = 1024
    """Episodes of each environment at a time."""
    ttl_s: float = 1800.0
    """An episode that nobody calls for so long is closed."""
    compatible: bool = False
    hosts: Sequence[str] = ()
    """Further names by which clients may call the server, such as a cluster's name of it."""


async def serve(serving: Serving, say: Callable[[str], None] = lambda _: None) -> None:
    """Serve until SIGTERM or SIGINT; `say` is told the addresses."""
    metrics, lag = Metrics("server", serving.environments), LoopLag()
    served = [await _episodes(env_id, options, serving, metrics) for env_id, options in serving.environments.items()]
    names = names_of(serving.host) | {name.lower() for name in serving.hosts}
    routes = [
        web.route(route.method, route.path, guarded(route.handler, names))
        for episodes in served
        for route in _routes(episodes, serving)
    ]
    refresh = lambda: metrics.set("event_loop_lag_seconds", lag.take())  # noqa: E731
    service = Service(metrics=metrics, stop_within_s=STOP_S, routes=routes, refresh=refresh)

    async def work() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(lag.watch())
            for episodes in served:
                group.create_task(episodes.reap(serving.ttl_s))

    try:
        async with service.open(serving.host, serving.port):
            for episodes in served:
                say(f"{episodes.env_id}: http://{serving.host}:{service.port}/{episodes.env_id}")
            service.ready = True
            await until_stopped(work(), service.stopping)
    finally:
        for episodes in served:
            await episodes.stop()


async def _episodes(env_id: str, options: Mapping[str, Any], serving: Serving, metrics: Metrics) -> Episodes:
    await registry.make(env_id, options).close()  # options that it cannot take are refused before anybody calls
    tasks = registry.tasks(env_id, options)
    host = WorkerHost(env_id, options, serving.workers) if serving.workers else LocalHost(env_id, options)
    return Episodes(env_id, host, tasks, serving.capacity, metrics)


def _routes(episodes: Episodes, serving: Serving) -> Sequence[web.RouteDef]:
    env_id = episodes.env_id
    dialect = DIALECTS.get(env_id, SERVED)
    wraps = dialect.bare and _reads_react(env_id, serving.environments[env_id])
    tasks = [asdict(task) for task in registry.tasks(env_id, serving.environments[env_id])]

    async def list_tasks(_: web.Request) -> web.Response:
        return web.json_response(tasks)

    async def greet(_: web.Request) -> web.Response:
        return web.json_response(f"This is environment {env_id}.")

    async def talk(request: web.Request) -> web.WebSocketResponse:
        return await converse(request, episodes)

    def at(base: str) -> list[web.RouteDef]:
        own = Face(episodes, dialect, wraps, serving.compatible).routes(base)
        plain = Face(episodes, SERVED, False, serving.compatible).routes(base + SERVED.prefix)
        other = [web.get(base or "/", greet), web.get(f"{base}/tasks", list_tasks), web.get(f"{base}/ws", talk)]
        return [*own, *plain, *other]

    return at(f"/{env_id}") + (at("") if len(serving.environments) == 1 else [])


def _reads_react(env_id: str, options: Mapping[str, Any]) -> bool:
    chosen = inspect.signature(registry.load(env_id)).parameters.get("format")
    return chosen is not None and options.get("format", chosen.default) == "react"


@dataclass(frozen=True)
class Face:
    """Episodes in the words of one dialect."""

    episodes: Episodes
    dialect: Dialect
    wraps: bool
    """An action comes without its reply, to an environment that reads replies: it is sent on as one."""
    compatible: bool

    def routes(self, base: str) -> list[web.RouteDef]:
        """Return the calls of the protocol; what only some of AgentGym's servers have besides answers nothing much."""
        calls = {"create": self._create, "reset": self._reset, "step": self._step, "close": self._close}
        posts = [web.post(f"{base}/{name}", self._answering(name, call)) for name, call in calls.items()]
        observation = web.get(f"{base}/observation", self._answering("observation", self._observation))
        nothing = self._answering("detail", self._nothing)
        return [
            *posts,
            observation,
            *(web.get(f"{base}/{name}", nothing) for name in ("filtered_vocab", "available_actions")),
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
                body=json.dumps(body).encode(), status=200 if self.compatible else status, headers=headers
            )

        return answer

    async def _create(self, _: web.Request) -> Any:
        return self.dialect.created(self.episodes.create())

    async def _reset(self, request: web.Request) -> Any:
        body = await _body(request)
        task = body.get("task_id", body.get(self.dialect.task))
        if isinstance(task, bool) or not isinstance(task, int | str | None):
            raise Refusal("bad_request", f"{self.dialect.task} is {task!r}: a task is a number")
        episode = self._episode(body)
        return self.dialect.begun(episode, await self.episodes.reset(episode, task))

    async def _step(self, request: web.Request) -> Any:
        body = await _body(request)
        text = body.get(self.dialect.action)
        if not isinstance(text, str):
            raise Refusal("bad_request", f"{self.dialect.action} is {text!r}: it is a text")
        if self.wraps and "Action:" not in text:
            text = f"Action: {text}"
        taken = await self.episodes.step(self._episode(body), text, request.headers.get(KEY_HEADER))
        return self.dialect.stepped(taken.step, taken.total)

    async def _close(self, request: web.Request) -> Any:
        await self.episodes.close(self._episode(await _body(request)))
        return {"closed": True}

    async def _observation(self, request: web.Request) -> Any:
        return self.episodes.observation(self._episode(request.query))

    async def _nothing(self, _: web.Request) -> Any:
        return []

    def _episode(self, given: Mapping[str, Any]) -> int:
        episode = given.get(self.dialect.key)
        if isinstance(episode, str) and episode.isdecimal() and len(episode) < 20:
            episode = int(episode)
        if isinstance(episode, bool) or not isinstance(episode, int):
            raise Refusal("bad_request", f"{self.dialect.key} is {episode!r}: it is the number that /create answered")
        return episode


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.read())
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise Refusal("bad_request", "the body is no JSON object")
    return body
