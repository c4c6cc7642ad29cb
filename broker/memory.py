"""The transport inside this process (`memory://NAME`), for tests of what is above the broker.

It behaves like a real one: leases expire, tickets are redelivered, each id is stored once, a full log makes publishers
wait, purges and watches work. Several transports on one MemoryServer stand for several programs on one broker.
"""

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from horizonrl.broker.api import (
    DEAD_MESSAGES,
    Extent,
    Key,
    Message,
    QueueState,
    Role,
    Stored,
    Stream,
    TransportCounters,
    check_gap,
    dead_bytes,
)
from horizonrl.common.config.schema import BrokerSection
from horizonrl.common.errors import LeaseLost, RecordTooLarge, RunUnknown, StateConflict

SERVERS: dict[str, "MemoryServer"] = {}
"""The brokers of this process, by the host of their url."""


async def connect(
    run: str,
    broker: BrokerSection,
    role: Role,
    existing: bool = False,
    wait_s: float | None = None,
) -> "MemoryTransport":
    """Open a run on the broker that `broker.url` names; it exists from its first use until the process ends.

    As on a real broker, the settings in force are those of the controller that connected last.
    """
    host = urlsplit(broker.servers[0]).hostname or ""
    server = SERVERS.setdefault(host, MemoryServer())
    if existing and run not in server.runs:
        raise RunUnknown(f"{broker.url} has no streams of run {run}")
    if role is Role.CONTROLLER and not existing:
        server.ack_wait_s, server.max_log_bytes = broker.ack_wait_s, broker.max_log_bytes
    server.runs[run]  # made, as a controller makes streams
    return MemoryTransport(server, run)


@dataclass
class MemoryStream:
    messages: dict[int, Message] = field(default_factory=dict)
    ids: dict[str, int] = field(default_factory=dict)
    """Sequence of each message id. It is kept when the message is purged: the id stays taken."""
    last_sequence: int = 0
    stored_bytes: int = 0

    @property
    def first_sequence(self) -> int:
        return next(iter(self.messages), self.last_sequence + 1)

    def append(
        self, subject: str, data: bytes, message_id: str | None, headers: dict[str, str]
    ) -> int:
        self.last_sequence += 1
        self.messages[self.last_sequence] = Message(
            subject, data, self.last_sequence, message_id, headers
        )
        self.stored_bytes += len(data)
        if message_id is not None:
            # Never forgotten, where NATS forgets after an hour (DUPLICATE_WINDOW_S).
            self.ids[message_id] = self.last_sequence
        return self.last_sequence

    def remove(self, sequence: int) -> None:
        self.stored_bytes -= len(self.messages.pop(sequence).data)


@dataclass
class MemoryLease:
    expires: float
    deliveries: int
    held: bool = True
    """False once given back: the ticket comes again at `expires`."""


@dataclass
class MemoryRun:
    streams: dict[Stream, MemoryStream] = field(default_factory=lambda: defaultdict(MemoryStream))
    leases: dict[int, MemoryLease] = field(default_factory=dict)
    """By sequence, the tickets that were delivered and not acknowledged."""
    delivered: int = 0
    """Sequence of the last ticket that was delivered for the first time."""
    idle: int = 0
    """Calls of `lease` that are waiting for a ticket."""
    state: dict[Key, tuple[int, bytes]] = field(default_factory=dict)
    set_at: dict[Key, float] = field(default_factory=dict)
    revision: int = 0


class MemoryServer:
    def __init__(
        self,
        *,
        ack_wait_s: float = 30.0,
        max_log_bytes: int = 4 << 30,
        max_payload_bytes: int = 8 << 20,
    ) -> None:
        self.ack_wait_s = ack_wait_s
        self.max_log_bytes = max_log_bytes
        self.max_payload_bytes = max_payload_bytes
        self.runs: dict[str, MemoryRun] = defaultdict(MemoryRun)
        self._changed = asyncio.Condition()

    async def notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def wait_until(self, ready: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(ready)

    async def wait_for_change(self, timeout_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait()


@dataclass
class MemoryDelivery:
    message: Message
    deliveries: int
    server: MemoryServer
    leases: dict[int, MemoryLease]

    async def extend(self) -> None:
        self._lease().expires = _now() + self.server.ack_wait_s

    async def acknowledge(self) -> None:
        # A late acknowledgement counts, as it does on the server.
        self.leases.pop(self.message.sequence, None)
        await self.server.notify()

    async def give_back(self, delay_s: float = 0.0) -> None:
        lease = self._lease()
        lease.held, lease.expires = False, _now() + delay_s
        await self.server.notify()

    def _lease(self) -> MemoryLease:
        lease = self.leases.get(self.message.sequence)
        # The count tells this hold from a later one of the same ticket.
        if lease is None or lease.deliveries != self.deliveries:
            raise LeaseLost(
                f"the ticket at {self.message.sequence} has been given to another actor"
            )
        return lease


class MemoryReader:
    def __init__(
        self, server: MemoryServer, stream: MemoryStream, name: str, after: int, pattern: str | None
    ) -> None:
        self._server = server
        self._stream = stream
        self._name = name
        self._next = after + 1
        self._pattern = pattern

    async def fetch(self, limit: int, timeout_s: float) -> list[Message]:
        # As with NATS: a reader never passes over purged messages in silence.
        check_gap(self._name, self._next, self._stream.first_sequence, self._stream.last_sequence)
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._server.wait_until(lambda: bool(self._matching(1)))
        messages = self._matching(limit)
        if messages:
            self._next = messages[-1].sequence + 1
        return messages

    def _matching(self, limit: int) -> list[Message]:
        messages: list[Message] = []
        for sequence in range(
            max(self._next, self._stream.first_sequence), self._stream.last_sequence + 1
        ):
            message = self._stream.messages.get(sequence)
            if message is not None and _matches(message.subject, self._pattern):
                messages.append(message)
            if len(messages) == limit:
                break
        return messages

    async def close(self) -> None:
        return


class MemoryTransport:
    def __init__(self, server: MemoryServer | None = None, run: str = "run") -> None:
        self.server = server or MemoryServer()
        self.run = run
        self.max_payload_bytes = self.server.max_payload_bytes
        self.ack_wait_s = self.server.ack_wait_s
        self.counters = TransportCounters()
        self._run = self.server.runs[run]
        self._open = True

    @property
    def connected(self) -> bool:
        return self._open

    @property
    def stalled_s(self) -> float:
        return 0.0

    @property
    def certificate_expiry(self) -> float:
        return math.inf

    async def publish(
        self,
        subject: str,
        data: bytes,
        *,
        message_id: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> Stored:
        if len(data) > self.max_payload_bytes:
            raise RecordTooLarge(
                f"{len(data)} bytes for {subject}: a message holds at most {self.max_payload_bytes}"
            )
        stream = self._run.streams[parse_stream(subject)]
        await self._wait_for_room(stream, len(data))
        if message_id is not None and message_id in stream.ids:
            return Stored(stream.ids[message_id], duplicate=True)
        # A copy, as on a wire: the caller may use its buffer again.
        sequence = stream.append(subject, bytes(data), message_id, dict(headers or {}))
        if stream is self._run.streams[Stream.DEAD]:
            self._make_room(stream)
        await self.server.notify()
        return Stored(sequence, duplicate=False)

    async def _wait_for_room(self, stream: MemoryStream, size: int) -> None:
        def has_room() -> bool:
            return stream.stored_bytes + size <= self.server.max_log_bytes

        if stream is self._run.streams[Stream.GROUPS] and not has_room():
            self.counters.full_waits += 1
            await self.server.wait_until(has_room)

    def _make_room(self, dead: MemoryStream) -> None:
        bound = dead_bytes(self.server.max_log_bytes)
        while dead.stored_bytes > bound or len(dead.messages) > DEAD_MESSAGES:
            dead.remove(dead.first_sequence)

    async def lease(self, timeout_s: float) -> MemoryDelivery | None:
        self._run.idle += 1
        try:
            return await self._lease(_now() + timeout_s)
        finally:
            self._run.idle -= 1

    async def _lease(self, deadline: float) -> MemoryDelivery | None:
        while (delivery := self._next_delivery()) is None:
            if (remaining := deadline - _now()) <= 0:
                return None
            # A lease that lapses notifies nobody, so the wait ends when the next one does.
            next_expiry = (
                min((lease.expires for lease in self._run.leases.values()), default=deadline)
                - _now()
            )
            await self.server.wait_for_change(max(0.0, min(remaining, next_expiry)))
        self.counters.redelivered += delivery.deliveries > 1
        return delivery

    def _next_delivery(self) -> MemoryDelivery | None:
        """Take a ticket whose lease has run out, else the next one that was never delivered."""
        run, messages = self._run, self._run.streams[Stream.TICKETS].messages
        lapsed = (sequence for sequence, lease in run.leases.items() if lease.expires <= _now())
        fresh = (sequence for sequence in messages if sequence > run.delivered)
        for sequence in (*lapsed, *fresh):
            earlier = run.leases.pop(sequence, None)
            run.delivered = max(run.delivered, sequence)
            if sequence in messages:  # a purged ticket is not delivered again
                deliveries = earlier.deliveries + 1 if earlier else 1
                run.leases[sequence] = MemoryLease(_now() + self.ack_wait_s, deliveries)
                return MemoryDelivery(messages[sequence], deliveries, self.server, run.leases)
        return None

    async def reader(self, stream: Stream, after: int, subject: str | None = None) -> MemoryReader:
        return MemoryReader(self.server, self._run.streams[stream], stream.value, after, subject)

    async def last(self, stream: Stream, subject: str) -> Message | None:
        messages = reversed(self._run.streams[stream].messages.values())
        return next((message for message in messages if _matches(message.subject, subject)), None)

    async def extent(self, stream: Stream) -> Extent:
        held = self._run.streams[stream]
        limit = self.server.max_log_bytes if stream is Stream.GROUPS else None
        return Extent(
            held.first_sequence, held.last_sequence, len(held.messages), held.stored_bytes, limit
        )

    async def queue(self) -> QueueState:
        fresh = [
            sequence
            for sequence in self._run.streams[Stream.TICKETS].messages
            if sequence > self._run.delivered
        ]
        # As a consumer's acknowledgement floor: everything below the oldest open lease is done.
        floor = min(self._run.leases, default=self._run.delivered + 1) - 1
        return QueueState(len(fresh), len(self._run.leases), floor, self._run.idle)

    async def purge(self, stream: Stream, below: int, subject: str | None = None) -> None:
        held = self._run.streams[stream]
        for sequence, message in list(held.messages.items()):
            if sequence < below and _matches(message.subject, subject):
                held.remove(sequence)
                if stream is Stream.TICKETS:
                    self._run.leases.pop(sequence, None)
        await self.server.notify()

    async def put(self, key: Key, data: bytes, after: int | None = None) -> int:
        if after is not None and self._run.state.get(key, (0, b""))[0] != after:
            raise StateConflict(
                f"the key {key.value} has been set by another program since revision {after}"
            )
        self._run.revision += 1
        self._run.set_at[key] = time.time()
        self._run.state[key] = (self._run.revision, bytes(data))
        await self.server.notify()
        return self._run.revision

    async def get(self, key: Key) -> bytes | None:
        return self._run.state.get(key, (0, None))[1]

    async def revision(self, key: Key) -> int:
        return self._run.state.get(key, (0, b""))[0]

    async def set_at(self, key: Key) -> float | None:
        return self._run.set_at.get(key)

    async def watch(self, key: Key) -> AsyncIterator[bytes]:
        seen = 0
        while True:
            await self.server.wait_until(lambda: self._run.state.get(key, (0, b""))[0] != seen)  # noqa: B023
            seen, data = self._run.state[key]
            yield data

    async def close(self) -> None:
        self._open = False


def parse_stream(subject: str) -> Stream:
    """Return the stream that stores a subject."""
    return Stream(subject.partition(".")[0].upper())


def _matches(subject: str, pattern: str | None) -> bool:
    """Return whether a subject is the pattern, or begins with it if it ends in `>`; None matches every subject."""
    if pattern is None or pattern == subject:
        return True
    return pattern.endswith(">") and subject.startswith(pattern[:-1])


def _now() -> float:
    return asyncio.get_running_loop().time()
