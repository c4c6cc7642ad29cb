"""A worker process: plays the episodes of one environment for the server that started it (hosts.py).

python -m horizonrl.envs.serving.worker ENV_ID PROCESSES FD; the first line from the server has the options
"""

import asyncio
import json
import socket
import sys
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import uvloop

from horizonrl.common.errors import HorizonError
from horizonrl.common.logs import get_logger
from horizonrl.envs import registry, share
from horizonrl.envs.api import Step
from horizonrl.envs.in_thread import in_thread
from horizonrl.envs.serving.hosts import LINE_BYTES, Lines, LocalHost

log = get_logger()

IDLE_S = 0.05
STEP_FIELDS = tuple(field.name for field in fields(Step))


async def work(env_id: str, processes: str, descriptor: str) -> None:
    """Answer calls until the socket closes; those of different episodes at the same time."""
    share.divide(int(processes))
    channel = socket.socket(fileno=int(descriptor))
    reader, writer = await asyncio.open_unix_connection(sock=channel, limit=LINE_BYTES)
    options = json.loads(await reader.readline())
    host, lines, calls = LocalHost(env_id, options), Lines(writer), _Calls()
    async with asyncio.TaskGroup() as group:
        ahead = group.create_task(_prepare(registry.preparation(env_id, options), calls))
        async for line in reader:
            calls.begin(group.create_task(_answer(host, lines, *json.loads(line))))
        ahead.cancel()
    await host.stop()


class _Calls:
    """Counts the calls, to tell when the worker is idle."""

    def __init__(self) -> None:
        self._none = asyncio.Event()
        self._none.set()
        self._begun = self._ended = 0

    def begin(self, call: asyncio.Task[None]) -> None:
        self._begun += 1
        self._none.clear()
        call.add_done_callback(self._end)

    def _end(self, _: asyncio.Task[None]) -> None:
        self._ended += 1
        if self._begun == self._ended:
            self._none.set()

    async def idle(self) -> None:
        """Wait until there has been no call for IDLE_S. Busy clients also leave gaps, but short ones."""
        begun = -1
        while begun != self._begun:
            await self._none.wait()
            begun = self._begun
            await asyncio.sleep(IDLE_S)

    @property
    def count(self) -> int:
        return self._begun


async def _prepare(prepare: Callable[[], bool], calls: _Calls) -> None:
    """Do ahead of need, while nobody calls, what resets would otherwise wait for."""
    try:
        more = True
        while more:
            await calls.idle()
            before = calls.count
            while more and calls.count == before:
                more = await in_thread(prepare)
    except Exception as error:  # noqa: BLE001 - whatever it is, the reset that needs the same will fail with it
        log.warning("environment_not_prepared", error=repr(error))


async def _answer(
    host: LocalHost, lines: Lines, number: int, call: str, episode: int, text: str
) -> None:
    error, value = None, await _result(host, call, episode, text)
    if isinstance(value, Exception):
        kind = type(value).__name__
        error, value = kind, str(value) if isinstance(value, HorizonError) else f"{kind}: {value}"
    lines.write([number, error, value])


async def _result(host: LocalHost, call: str, episode: int, text: str) -> Any:
    try:
        match call:
            case "reset":
                return await host.reset(episode, text)
            case "step":
                step = await host.step(episode, text)
                return [getattr(step, name) for name in STEP_FIELDS]
            case _:
                return await host.close(episode)
    except Exception as error:  # noqa: BLE001 - an environment is anybody's code: its failure is the episode's
        return error


if __name__ == "__main__":
    uvloop.run(work(*sys.argv[1:]))
