"""A broker that answers and yet does not deliver: its readers fall silent."""

from dataclasses import dataclass

from horizonrl.broker.api import Message, Stream
from horizonrl.broker.memory import MemoryReader, MemoryServer, MemoryTransport


@dataclass
class FallingSilent:
    transport: "SilentTransport"
    reader: MemoryReader

    async def fetch(self, limit: int, timeout_s: float) -> list[Message]:
        messages = (
            await self.reader.fetch(min(limit, self.transport.delivered), timeout_s)
            if self.transport.delivered
            else []
        )
        self.transport.delivered -= len(messages)
        return messages

    async def close(self) -> None:
        self.transport.readers -= 1


class SilentTransport(MemoryTransport):
    """Gives its readers `delivered` more messages, then nothing."""

    def __init__(self, server: MemoryServer, delivered: int = 0) -> None:
        super().__init__(server)
        self.delivered = delivered
        self.readers = 0
        """How many are open."""

    async def reader(self, stream: Stream, after: int, subject: str | None = None) -> FallingSilent:  # type: ignore[override]
        self.readers += 1
        return FallingSilent(self, await super().reader(stream, after, subject))
