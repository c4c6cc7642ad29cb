"""A worker process: plays the episodes of one environment for the server that started it (hosts.py).

python -m horizonrl.envs.serving.worker ENV_ID FD; the first line from the server has the options
"""

import asyncio
import json
import socket
import sys
from dataclasses import asdict
from typing import Any

import uvloop

from horizonrl.common.errors import HorizonError
from horizonrl.envs.serving.hosts import LINE_BYTES, LocalHost


async def work(env_id: str, descriptor: str) -> None:
    """Answer calls until the socket closes; those of different episodes at the same time."""
    channel = socket.socket(fileno=int(descriptor))
    reader, writer = await asyncio.open_unix_connection(sock=channel, limit=LINE_BYTES)
    host = LocalHost(env_id, json.loads(await reader.readline()))
    async with asyncio.TaskGroup() as calls:
        async for line in reader:
            calls.create_task(_answer(host, writer, *json.loads(line)))
    await host.stop()


async def _answer(
    host: LocalHost, writer: asyncio.StreamWriter, number: int, call: str, episode: int, text: str
) -> None:
    error, value = None, await _result(host, call, episode, text)
    if isinstance(value, Exception):
        kind = type(value).__name__
        error, value = kind, str(value) if isinstance(value, HorizonError) else f"{kind}: {value}"
    # One write per line, so that answers of different episodes never mix.
    writer.write(json.dumps([number, error, value]).encode() + b"\n")


async def _result(host: LocalHost, call: str, episode: int, text: str) -> Any:
    try:
        match call:
            case "reset":
                return await host.reset(episode, text)
            case "step":
                return asdict(await host.step(episode, text))
            case _:
                return await host.close(episode)
    except Exception as error:  # noqa: BLE001 - an environment is anybody's code: its failure is the episode's
        return error


if __name__ == "__main__":
    uvloop.run(work(*sys.argv[1:]))
