"""A stub of AgentGym's servers: replays the wire examples of all fifteen ids, and breaks in every way on demand.

Written from the protocol's description, not from our dialects: what the two disagree on fails a test.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

FIRST, NEXT = "You see a door.", "It opens."
TOOLS = ("weather", "movie", "academia", "sheet", "todo")
REACT = "Thought: a\nAction: go on"


@dataclass(frozen=True)
class Wire:
    """One id's examples: what its server is sent and answers, and what the agent then reads."""

    key: str
    reset: dict[str, Any]
    """What /reset is sent for task 3, beside the key."""
    begun: Any
    stepped: dict[str, Any]
    created: Any = 7
    create: dict[str, Any] = field(default_factory=dict)
    prefix: str = ""
    closes: bool = False
    reply: str = REACT
    action: str = "go on"
    first: str = FIRST


GENERIC = {"observation": NEXT, "reward": 1, "done": True}
WIRES: dict[str, Wire] = {
    "textcraft": Wire(
        "id", {"data_idx": 3}, {"id": 7, "observation": FIRST, "done": False, "reward": 0}, GENERIC,
        created={"id": 7, "observation": "", "done": False, "reward": 0}, closes=True,
    ),
    "babyai": Wire(
        "id", {"data_idx": 3}, {"observation": FIRST, "reward": 0, "score": 0, "deleted": False, "done": False},
        {"observation": NEXT, "reward": 0.2, "score": 0.9, "done": True}, created={"id": 7}, closes=True,
    ),
    "sciworld": Wire(
        "id", {"data_idx": 3},
        {"task_name": "boil", "var_num": 0, "task_description": "Boil water.", "observation": FIRST, "reward": 0,
         "score": 0, "deleted": False, "done": False},
        {"observation": NEXT, "reward": 75, "score": 100, "done": True}, created={"id": 7}, closes=True,
        first=f"Boil water.\n{FIRST}",
    ),
    "alfworld": Wire(
        "id", {"game": 3, "world_type": "Text"},
        {"id": 7, "observation": FIRST, "available_actions": ["look", "go to desk 1"], "task_type": "look"},
        {"observation": NEXT, "reward": 1.0, "available_actions": ["look"], "done": True}, created={"id": 7},
        first=f"{FIRST}\nAVAILABLE ACTIONS: look,go to desk 1",
    ),
    "maze": Wire("id", {"game": 3}, {"observation": FIRST}, GENERIC, created={"id": 7}, prefix="/maze"),
    "wordle": Wire("id", {"seed": 3}, {"observation": FIRST}, GENERIC, created={"id": 7}, prefix="/wordle"),
    "webshop": Wire(
        "env_idx", {"session_id": 3}, [FIRST, None], {"state": NEXT, "reward": 1.0, "done": True, "info": None},
    ),
    "webarena": Wire(
        "env_idx", {"seed": 0, "idx": 3}, {"observation": FIRST, "sites": ["shopping"], "object": "buy"},
        {"observation": NEXT, "reward": 1.0, "terminated": True, "truncated": False, "info": {}},
        created={"env_idx": 7}, closes=True, reply="So ```stop [4]```", action="So ```stop [4]```",
    ),
    "sqlgym": Wire(
        "env_idx", {"item_id": 3}, [FIRST, None],
        {"state": NEXT, "reward": 1.0, "done": True, "info": {"answer": "SELECT 2"}},
        reply="So:\n```sql\nSELECT 1\n```", action="SELECT 1",
    ),
    "searchqa": Wire(
        "env_idx", {"id": 3}, FIRST, {**GENERIC, "info": None}, create={"id": 0}, closes=True, action=REACT,
    ),
    **{name: Wire("env_idx", {"id": 3}, FIRST, GENERIC, create={"id": 0}, action=REACT) for name in TOOLS},
}  # fmt: skip


class Stub:
    """A server of one id. `faults` maps a path to what goes wrong there, once for each entry:

    a number (that status), `error` (200 with an error), `false`, `text`, `empty`, `hang`, `drop` (no answer).
    """

    def __init__(self, name: str, counts: bool = False) -> None:
        self.wire = WIRES[name]
        self.counting = counts
        """Its environments have the numbers 0, 1, 2, ... instead of 7."""
        self.created = 0
        self.faults: dict[str, list[Any]] = {}
        self.requests: list[tuple[str, Any]] = []
        self.counts: Counter[str] = Counter()
        self.answers: list[Any] = []
        """Steps to answer before the example, which ends the episode."""
        self.repeatable = False
        """It says that it answers a step of a known key without taking it again."""
        self.keys: list[str] = []
        self.drops_kept = False
        """It closes a connection that was kept open, with the next request on it."""
        self._kept: set[asyncio.BaseTransport | None] = set()
        self.port = 0
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def base(self) -> str:
        return self.url + self.wire.prefix

    async def start(self) -> None:
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(application, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def die(self) -> None:
        """Close every connection and the port."""
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path.removeprefix(self.wire.prefix)
        if self.wire.prefix and path == request.path:
            raise web.HTTPNotFound
        body = await request.json() if request.method == "POST" else dict(request.query)
        self.requests.append((f"{request.method} {path}", body))
        self.counts[path] += 1
        self.keys += request.headers.getall("Idempotency-Key", [])
        if self.drops_kept and request.transport in self._kept:
            return await self._fail("drop", request)
        self._kept.add(request.transport)
        if waiting := self.faults.get(path):
            return await self._fail(waiting.pop(0), request)
        answer = self._example(f"{request.method} {path}", body)
        if answer is None:
            raise web.HTTPNotFound
        return web.json_response(
            answer, headers={"Idempotent-Steps": "1"} if self.repeatable else {}
        )

    def _example(self, request: str, body: Any) -> Any:
        wire, key = self.wire, {self.wire.key: 7}
        if self.counting and wire.key in body:
            body = {**body, wire.key: 7}
        match request:
            case "POST /create" if body == wire.create:
                self.created += 1
                return (
                    {**wire.created, wire.key: self.created - 1} if self.counting else wire.created
                )
            case "POST /reset" if body == key | wire.reset:
                return wire.begun
            case "POST /step" if body == key | {"action": wire.action}:
                return self.answers.pop(0) if self.answers else wire.stepped
            case "POST /close" if body == key and wire.closes:
                return {"closed": True}
            case "GET /observation" if body == {wire.key: "7"}:
                return FIRST
            case "GET /filtered_vocab" if wire.prefix == "/wordle":
                return ["s h i r e", "p a n i c"]
        return None

    async def _fail(self, fault: Any, request: web.Request) -> web.StreamResponse:
        match fault:
            case "hang":
                await asyncio.sleep(60)
            case "drop":
                assert request.transport is not None
                request.transport.abort()
            case "error":
                return web.json_response({"error": "The id 7 is not valid."})
            case "false":
                return web.json_response(False)
            case "empty":
                return web.json_response({})
            case int(status):
                return web.Response(status=status, text="Internal Server Error")
        return web.Response(text="not JSON", content_type="application/json")


@asynccontextmanager
async def stub_of(name: str, counts: bool = False) -> AsyncIterator[Stub]:
    stub = Stub(name, counts)
    await stub.start()
    try:
        yield stub
    finally:
        await stub.die()
