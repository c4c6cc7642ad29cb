"""nats-py's client, where it has to do otherwise than nats-py 2.16 does."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import nats.errors
from nats.aio.client import Client


class AbortingClient(Client):
    """A client that leaves a connection at once, and can hand over answers whose headers it has not read."""

    def __init__(self) -> None:
        super().__init__()
        self._unread: dict[int, asyncio.Queue[tuple[bytes, bytes]]] = {}
        """By subscription, where its messages go."""

    @contextlib.asynccontextmanager
    async def unread_answers(self) -> AsyncIterator[tuple[str, asyncio.Queue[tuple[bytes, bytes]]]]:
        """Yield a subject for answers, and the queue to which each comes as its header block and its data."""
        subscription = await self.subscribe(self.new_inbox())
        answers: asyncio.Queue[tuple[bytes, bytes]] = asyncio.Queue()
        self._unread[subscription._id] = answers
        try:
            yield subscription.subject, answers
        finally:
            # Both before the next message is read: it would otherwise reach nats-py's parser of headers.
            del self._unread[subscription._id]
            with contextlib.suppress(nats.errors.Error):
                await subscription.unsubscribe()

    async def _process_msg(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes
    ) -> None:
        if (answers := self._unread.get(sid)) is not None:
            answers.put_nowait((headers or b"", data))
        else:
            await super()._process_msg(sid, subject, reply, data, headers)

    async def _attempt_reconnect(self) -> None:
        # nats-py 2.16 closes the connection first, and waits until what it has buffered is sent: a server that is
        # paused or cut off takes nothing, and the client would stay with it until the kernel gives up (15 minutes).
        # Nothing is lost: what was not answered is sent again.
        self._abort()
        await super()._attempt_reconnect()

    async def _connect_to_server(self, *arguments: Any) -> None:
        # A server that closed the last attempt before its first line has left a connection that nats-py does not close.
        self._abort()
        await super()._connect_to_server(*arguments)

    @property
    def writer(self) -> asyncio.StreamWriter | None:
        """The open connection's own end; None before there is one, and for a websocket."""
        return getattr(self._transport, "_io_writer", None)

    def _abort(self) -> None:
        if self.writer is not None:
            self.writer.transport.abort()
