"""Behind a slow line, what takes longer than the usual wait for an answer still ends."""

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from horizonrl.broker.api import Stream
from horizonrl.broker.nats import reader, transport
from horizonrl.broker.nats.connect import connect
from horizonrl.broker.nats.server import EmbeddedServer
from horizonrl.common.config.schema import BrokerSection

pytestmark = pytest.mark.process
RATE = 1_000_000
"""Bytes per second, in each direction."""


async def throttle(taken: asyncio.StreamReader, given: asyncio.StreamWriter) -> None:
    free_at = 0.0
    try:
        while data := await taken.read(16_384):
            free_at = max(free_at, time.monotonic()) + len(data) / RATE
            await asyncio.sleep(free_at - time.monotonic())
            given.write(data)
            await given.drain()
    except OSError:
        pass
    finally:
        given.close()


@asynccontextmanager
async def slow_line(port: int) -> AsyncIterator[str]:
    async def carry(taken: asyncio.StreamReader, given: asyncio.StreamWriter) -> None:
        upstream, downstream = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(throttle(taken, downstream), throttle(upstream, given))

    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)  # the wait is on the line, not in a buffer
    listening.bind(("127.0.0.1", 0))
    line = await asyncio.start_server(carry, sock=listening, limit=65_536)
    try:
        yield f"nats://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        line.close()


def test_messages_that_share_a_slow_line_arrive(nats_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "ANSWER_S", 0.1)
    monkeypatch.setattr(transport, "SECONDS_PER_MB", 0.7)  # the line is slower than expected
    monkeypatch.setattr(reader, "ANSWER_S", 0.2)

    async def scenario() -> None:
        assert nats_server.port is not None
        near = await connect("slow", BrokerSection(url=nats_server.url))
        async with slow_line(nats_server.port) as url:
            far = await connect("slow", BrokerSection(url=url))
            async with asyncio.timeout(12):
                sent = [os.urandom(300_000) for _ in range(6)]
                await asyncio.gather(
                    *(far.publish("groups.train", data, message_id=f"m{n}") for n, data in enumerate(sent))
                )
                reading = await far.reader(Stream.GROUPS, 0)
                first = await reading.fetch(1, 10.0)
            assert first[0].data in sent
            assert (await near.extent(Stream.GROUPS)).messages == len(sent)
            assert far.counters.reconnects == 0
            await far.close()
        await near.close()

    asyncio.run(scenario())
