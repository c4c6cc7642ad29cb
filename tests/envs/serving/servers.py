"""A server within a test, and a small environment to serve that can be told to misbehave."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import ClientSession

from horizonrl.envs.serving.server import Serving, serve

WORLD = '''
import asyncio
import os
import numpy as np
from horizonrl.common.errors import ConfigError, EnvironmentFailure
from horizonrl.envs.api import Observation, Step, TaskSpec

class World:
    """Say the task's id to win; other words do as they say."""

    env_id = "world"
    version = "1"
    released = asyncio.Event()
    closed = []

    def __init__(self, *, reward: float = 1.0):
        self.reward, self.steps, self.within, self.task_id = reward, 0, 0, ""

    @classmethod
    def tasks(cls):
        return [TaskSpec(f"task {letter}", "train", "all") for letter in "abcd"]

    async def reset(self, task_id):
        self.task_id, self.steps = task_id, 0
        return Observation(f"Say {task_id}.\\nNow.")

    async def step(self, text):
        self.steps += 1
        if "slow" in text:
            self.within += 1
            await asyncio.sleep(0.05)
            overlap, self.within = self.within > 1, self.within - 1
            return Step("overlap" if overlap else "alone", 0.0, False)
        if "hold" in text:
            await World.released.wait()
            return Step("released", 0.0, False)
        if "release" in text:
            World.released.set()
        if "hang" in text:
            await asyncio.sleep(60)
        if "spin" in text:
            while True:
                pass
        if "break" in text:
            raise EnvironmentFailure("it broke")
        if "defect" in text:
            raise ZeroDivisionError("a defect")
        if "closed" in text:
            return Step(" ".join(World.closed), 0.0, False)
        if "numbers" in text:
            return Step("numbers", np.float32(0.5), np.bool_(True), np.bool_(False), np.bool_(True), {"n": np.int64(3)})
        if "no text" in text:
            return Step(np.arange(3), 0.0, False)
        if "no number" in text:
            return Step("no number", None, False)
        if "cut" in text:
            return Step("cut", 0.25, False, truncated=True)
        if "die" in text:
            os._exit(3)
        won = self.task_id in text
        return Step(f"step {self.steps}", self.reward * won, won, success=won)

    def expert(self):
        raise EnvironmentFailure("none")

    async def close(self):
        World.closed += filter(None, [self.task_id])
'''


@asynccontextmanager
async def server_of(
    environments: Mapping[str, Mapping[str, Any]], **options: Any
) -> AsyncIterator[str]:
    """Serve on a free port; yield the server's address without a path."""
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def say(line: str) -> None:
        if not address.done():
            address.set_result(line.partition(": ")[2].rpartition("/")[0])

    task = asyncio.create_task(serve(Serving(environments, **options), say))
    await asyncio.wait({task, address}, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        await task
    try:
        yield await address
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class Caller:
    """Calls a server without our client."""

    def __init__(self, http: ClientSession, base: str) -> None:
        self._http = http
        self.base = base

    async def __call__(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self._http.post(f"{self.base}/{path}", json=body, headers=named) as response:
            return response.status, await response.json(content_type=None)

    async def get(self, path: str) -> tuple[int, str]:
        async with self._http.get(f"{self.base}/{path}") as response:
            return response.status, await response.text()

    async def read(self, path: str) -> tuple[int, Any]:
        """Return the JSON of an answer."""
        status, text = await self.get(path)
        return status, json.loads(text)

    async def begin(self, task: Any = 0) -> int:
        _, created = await self("create")
        episode: int = created["id"]
        status, answer = await self("reset", {"id": episode, "task_id": task})
        assert status == 200, answer
        return episode


@asynccontextmanager
async def caller_of(env_id: str, path: str = "", **options: Any) -> AsyncIterator[Caller]:
    async with server_of({env_id: {}}, **options) as url, ClientSession() as http:
        yield Caller(http, url + path)
