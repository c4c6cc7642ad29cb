"""A small OpenAI-compatible server: says one thing, remembers what it was asked, and breaks in every way on demand."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Fault = tuple[int, dict[str, str], str]
"""Status, headers and body of an answer that comes instead of the good one."""


@dataclass
class Completions:
    says: str = "even"
    tokens: int | None = 3
    """What `usage` says; None leaves it empty."""
    faults: list[Fault | None] = field(default_factory=list)
    """For the next requests, one after the other; None answers well, and an empty list too."""
    listing: int = 200
    """Status of the list of models."""
    delay_s: float = 0.0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    url: str = ""

    async def answer(self, request: web.Request) -> web.Response:
        self.keys.append(request.headers.get("Authorization"))
        self.bodies.append(await request.json())
        await asyncio.sleep(self.delay_s)
        if self.faults and (fault := self.faults.pop(0)) is not None:
            status, headers, text = fault
            return web.Response(status=status, headers=headers, text=text)
        message = {"role": "assistant", "content": self.says}
        usage = (
            None if self.tokens is None else {"prompt_tokens": 9, "completion_tokens": self.tokens}
        )
        return web.json_response(
            {"id": "x", "choices": [{"index": 0, "message": message}], "usage": usage}
        )

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "big"}]}, status=self.listing)


def refusal(status: int, message: str = "no", **headers: str) -> Fault:
    return status, headers, json.dumps({"error": {"message": message}})


@contextmanager
def serving(completions: Completions) -> Iterator[Completions]:
    """Serve in a thread of its own, so that the program under test may have its own event loop."""
    loop, ready, over = asyncio.new_event_loop(), threading.Event(), asyncio.Event()

    async def serve() -> None:
        application = web.Application()
        application.router.add_post("/v1/chat/completions", completions.answer)
        application.router.add_get("/v1/models", completions.models)
        runner = web.AppRunner(application, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        completions.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        ready.set()
        await over.wait()
        await asyncio.sleep(
            0.1
        )  # a connection that is being accepted is none that `cleanup` closes
        await runner.cleanup()

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(30)
    try:
        yield completions
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(30)
