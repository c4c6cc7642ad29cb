"""The proxy between roles and broker, in front of a server that answers with what it was sent."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest

from tests.faults.proxy import CHUNK_BYTES, Proxy

Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


@asynccontextmanager
async def proxied() -> AsyncIterator[tuple[Proxy, Ends]]:
    """An echo server, a proxy before it and a connection through both."""
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    async with server, Proxy(server.sockets[0].getsockname()[1]) as proxy:
        reader, writer = await connect(proxy)
        yield proxy, (reader, writer)
        writer.close()


async def connect(proxy: Proxy) -> Ends:
    address = urlsplit(proxy.url)
    return await asyncio.open_connection(address.hostname, address.port)


async def answered(ends: Ends, data: bytes) -> float:
    """Return how long it took until the echo had come back."""
    started = asyncio.get_running_loop().time()
    ends[1].write(data)
    async with asyncio.timeout(10):
        assert await ends[0].readexactly(len(data)) == data
    return asyncio.get_running_loop().time() - started


async def ended(ends: Ends) -> bool:
    """Return whether the connection ended, by a reset or cleanly."""
    async with asyncio.timeout(10):
        try:
            return await ends[0].read(1) == b""
        except ConnectionResetError:
            return True


async def test_bytes_pass_both_ways_unchanged() -> None:
    async with proxied() as (_, ends):
        await answered(ends, bytes(range(256)) * 1000)


async def test_a_delay_holds_bytes_back_in_both_directions_until_it_is_taken_away() -> None:
    async with proxied() as (proxy, ends):
        proxy.delay_s = 0.1
        assert await answered(ends, b"late") >= 0.2
        proxy.delay_s = 0.0
        await answered(ends, b"again")


async def test_breaking_ends_every_connection_and_lets_new_ones_come() -> None:
    async with proxied() as (proxy, ends):
        other = await connect(proxy)
        await answered(ends, b"one")
        await answered(other, b"two")
        assert proxy.break_connections() == 2
        assert await ended(ends)
        assert await ended(other)
        other[1].close()
        third = await connect(proxy)
        await answered(third, b"three")
        third[1].close()


async def test_a_server_that_is_down_is_a_connection_that_ends() -> None:
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    async with Proxy(port) as proxy:
        ends = await connect(proxy)
        assert await ended(ends)
        ends[1].close()


async def test_a_side_that_closes_ends_the_other_after_its_last_bytes() -> None:
    received = asyncio.get_running_loop().create_future()

    async def keep(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.set_result(await reader.read(-1))
        writer.close()

    server = await asyncio.start_server(keep, "127.0.0.1", 0)
    async with server, Proxy(server.sockets[0].getsockname()[1]) as proxy:
        _, writer = await connect(proxy)
        writer.write(b"last words" * 1000)
        writer.close()
        async with asyncio.timeout(10):
            assert await received == b"last words" * 1000


@pytest.mark.parametrize("size", [1, CHUNK_BYTES, 3 * CHUNK_BYTES + 1])
async def test_chunks_keep_their_order_under_a_delay(size: int) -> None:
    async with proxied() as (proxy, ends):
        proxy.delay_s = 0.005
        await answered(ends, bytes(n % 251 for n in range(size)))


async def test_held_bytes_come_through_once_the_line_is_whole_again() -> None:
    async with proxied() as (proxy, ends):
        await answered(ends, b"before")
        proxy.hold()
        waiting = asyncio.create_task(answered(ends, b"held"))
        new = asyncio.create_task(connect(proxy))
        done, _ = await asyncio.wait([waiting], timeout=0.3)
        assert not done
        proxy.release()
        await waiting
        other = await new
        await answered(other, b"after")
        other[1].close()
