"""A TCP proxy between the roles and their broker, or between its servers. It can delay, break and hold connections."""

import asyncio
import contextlib
from types import TracebackType
from typing import Self

CHUNK_BYTES = 1 << 16


class Proxy:
    """Use as `async with Proxy(broker_port) as proxy: proxy.url`. If the broker is down, connections end at once."""

    def __init__(self, broker_port: int, host: str = "127.0.0.1") -> None:
        self.delay_s = 0.0
        """Delay of each chunk of at most CHUNK_BYTES. The next chunk waits behind it."""
        self._host, self._broker_port = host, broker_port
        self._server: asyncio.Server | None = None
        self._passing = asyncio.Event()
        self._passing.set()
        self._open: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"nats://{self._host}:{self.port}"

    @property
    def port(self) -> int:
        assert self._server is not None, "the proxy was not started"
        return int(self._server.sockets[0].getsockname()[1])

    def hold(self) -> None:
        """Carry nothing until `release`, and break no connection: a cut line, of which neither side is told."""
        self._passing.clear()

    def release(self) -> None:
        self._passing.set()

    def break_connections(self) -> int:
        """Reset every connection, as a failing network would; return how many there were."""
        # Each connection has two ends here.
        broken = len(self._open) // 2
        # abort, not close: a close would first send what is buffered, which no failing network does.
        for writer in self._open:
            writer.transport.abort()
        return broken

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, self._host, 0)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.release()
        self.break_connections()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one connection both ways until either side ends it."""
        await self._passing.wait()
        try:
            broker_reader, broker_writer = await asyncio.open_connection(
                self._host, self._broker_port
            )
        except OSError:
            writer.transport.abort()
            return
        ends = {writer, broker_writer}
        self._open |= ends
        ways = [
            asyncio.create_task(self._carry(reader, broker_writer)),
            asyncio.create_task(self._carry(broker_reader, writer)),
        ]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.close()
        await asyncio.wait(ways)
        self._open -= ends

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                await self._passing.wait()
                writer.write(data)
                # Back-pressure: a slow side has to slow the other one, not fill this process's memory.
                await writer.drain()
