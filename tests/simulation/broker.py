"""The broker of a simulation: the memory broker behind connections that delay, lose and repeat requests.

`MemoryTransport` says what a request does. It does so at one moment, on the host's side, where the history records it.
`Link` is what a role holds: as the transport on NATS, it repeats a request until an answer comes, so that a request may
take effect twice, long after it was sent, or without its sender ever knowing.
"""

import asyncio
import copy
import math
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from horizonrl.broker.api import (
    Extent,
    Key,
    Message,
    QueueState,
    Stored,
    Stream,
    TransportCounters,
    check_gap,
)
from horizonrl.broker.memory import (
    MemoryDelivery,
    MemoryReader,
    MemoryServer,
    MemoryTransport,
    parse_stream,
)
from horizonrl.common.errors import BrokerUnreachable, LeaseLost, RecordTooLarge, StateConflict
from tests.simulation.clock import Life, VirtualLoop
from tests.simulation.history import History
from tests.simulation.storm import Storm

T = TypeVar("T")
ANSWER_S, CALL_S, PULL_S, PUT_PAUSE_S = 2.0, 600.0, 30.0, 0.1
"""As the transport on NATS has them."""
FORGETS_S = 3600.0
"""How long the broker remembers message ids."""


class Nothing(Exception):
    """The broker has nothing to answer yet."""


class QuietServer(MemoryServer):
    """A memory server that wakes its waiters without waiting itself: each of its requests is one moment."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._woken: list[asyncio.Future[None]] = []
        self.polls: list[Attempt[Any]] = []
        """Requests to try again when something has changed."""

    async def notify(self) -> None:
        woken, self._woken = self._woken, []
        for waiter in woken:
            if not waiter.done():
                waiter.set_result(None)
        for poll in self.polls:
            asyncio.get_running_loop().call_soon(poll.serve)

    async def wait_until(self, ready: Callable[[], bool]) -> None:
        while not ready():
            await self._wait()

    async def wait_for_change(self, timeout_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._wait()

    async def _wait(self) -> None:
        self._woken.append(waiter := asyncio.get_running_loop().create_future())
        await waiter


def at_once(request: Coroutine[Any, Any, T]) -> T:
    """Return what a request comes to that waits for nothing."""
    try:
        request.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    raise AssertionError("a request of the memory broker waits")


@dataclass
class SimulatedBroker:
    """The one broker: what every link shares."""

    loop: VirtualLoop
    storm: Storm
    history: History
    server: QuietServer
    put_ids: dict[int, int] = field(default_factory=dict)
    """By revision, which put has set it."""
    archive: dict[int, Message] = field(default_factory=dict)
    """Every message of the group log, purged ones included."""
    down: bool = False
    links: list["Link"] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.memory = MemoryTransport(self.server, "run")
        self.run = self.server.runs["run"]
        self._puts, self._wakes_at = 0, -1.0

    def next_put(self) -> int:
        self._puts += 1
        return self._puts

    def publish(
        self, life: Life, subject: str, data: bytes, message_id: str | None, headers: Any
    ) -> Stored:
        stream = self.run.streams[parse_stream(subject)]
        in_log = parse_stream(subject) is Stream.GROUPS
        full = stream.stored_bytes + len(data) > self.server.max_log_bytes
        if in_log and full and message_id not in stream.ids:
            raise Nothing
        stored = at_once(self.memory.publish(subject, data, message_id=message_id, headers=headers))
        if not stored.duplicate:
            message = stream.messages.get(stored.sequence)
            if message is not None and in_log:
                self.archive[stored.sequence] = message
            if message_id is not None:
                self.loop.call_later(FORGETS_S, stream.ids.pop, message_id, None)
        self.history.publish(life, subject, data, message_id, stored)
        return stored

    def put(self, life: Life, key: Key, data: bytes, after: int, put_id: int) -> int | None:
        """Set a key if it has the revision `after`; return None if it has another one."""
        try:
            revision = at_once(self.memory.put(key, data, after))
        except StateConflict:
            return None
        self.put_ids[revision] = put_id
        self.history.put(life, key, data, revision)
        return revision

    def purge(self, life: Life, stream: Stream, below: int, subject: str | None) -> None:
        before = dict(self.run.streams[stream].messages)
        at_once(self.memory.purge(stream, below, subject))
        gone = [
            message
            for sequence, message in before.items()
            if sequence not in self.run.streams[stream].messages
        ]
        if gone:
            self.history.purge(life, stream, below, gone, self.run.streams[stream].messages)

    def lease(self, life: Life) -> MemoryDelivery:
        delivery = at_once(self.memory.lease(0.0))
        if delivery is None:
            due = min((lease.expires for lease in self.run.leases.values()), default=math.inf)
            if due < math.inf and not self.loop.now < self._wakes_at <= due:
                self._wakes_at = max(due, self.loop.now)
                # Nobody is told when a lease lapses.
                self.loop.call_at(self._wakes_at, self.wake)
            raise Nothing
        self.history.lease(life, delivery)
        return delivery

    def wake(self) -> None:
        for poll in list(self.server.polls):
            poll.serve()

    def fail(self, outage_s: float) -> None:
        """Be away for a while."""
        self.down = True
        self.loop.call_later(outage_s, self.recover)

    def recover(self) -> None:
        self.down = False
        for link in self.links:
            self.loop.call_later(self.storm.latency_s(), link.reconnect)
        self.wake()

    def saved(self) -> dict[str, Any]:
        names = ("streams", "leases", "delivered", "state", "revision")
        return copy.deepcopy({name: getattr(self.run, name) for name in names})

    def restore(self, backup: dict[str, Any]) -> None:
        """Put back what was saved, into the streams that readers hold."""
        for stream in Stream:
            vars(self.run.streams[stream]).update(vars(copy.deepcopy(backup["streams"][stream])))
        self.run.leases.clear()
        self.run.leases.update(backup["leases"])
        self.run.delivered, self.run.revision = backup["delivered"], backup["revision"]
        self.run.state = dict(backup["state"])
        last = self.run.streams[Stream.GROUPS].last_sequence
        self.archive = {
            sequence: message for sequence, message in self.archive.items() if sequence <= last
        }
        self.history.restored()
        self.recover()


class Attempt(Generic[T]):
    """A request on its way to the broker, kept there until it can be answered, and on its way back."""

    def __init__(self, link: "Link", name: str, request: Callable[[], T], poll_s: float) -> None:
        self.broker, self.link, self.request = link.broker, link, request
        self.answer: asyncio.Future[T] = self.broker.loop.create_future()
        self.fate, self.answered = self.broker.storm.fate(name), False
        self.kept_until = self.broker.loop.time() + poll_s if poll_s else 0.0
        for arrives_s in self.fate.arrivals_s:
            self.broker.storm.on_host(self.broker.loop.call_later, arrives_s, self.serve)

    @property
    def waits(self) -> bool:
        """Whether the broker may keep it: whoever asked still listens."""
        now = self.broker.loop.time()
        listens = self.link.connected and not self.answer.done()
        return now <= self.kept_until and listens and not self.answered

    def serve(self) -> None:
        """Take effect now, unless there is nothing to answer yet."""
        self.withdraw()
        if self.broker.down or (self.kept_until and not self.waits):
            return
        try:
            outcome, error = self.request(), None
        except Nothing:
            if self.waits:
                self.broker.server.polls.append(self)
            return
        except Exception as failure:  # noqa: BLE001 - an answer as well
            outcome, error = None, failure
        self.answered = True
        if not self.fate.answer_lost:
            self.broker.loop.call_later(self.fate.answer_s, self.tell, outcome, error)

    def tell(self, outcome: Any, error: Exception | None) -> None:
        # Who has stopped waiting, or died, does not hear it.
        if self.answer.done() or self.broker.down:
            return
        if error is None:
            self.answer.set_result(outcome)
        else:
            self.answer.set_exception(error)

    def withdraw(self) -> None:
        if self in self.broker.server.polls:
            self.broker.server.polls.remove(self)


class Link:
    """A transport of one life."""

    def __init__(self, broker: SimulatedBroker, life: Life) -> None:
        self.run, self.server = "run", broker.server
        self.max_payload_bytes = broker.server.max_payload_bytes
        self.ack_wait_s = broker.server.ack_wait_s
        self.counters = TransportCounters()
        self.broker, self.life = broker, life
        self._open = True
        broker.links.append(self)
        life.kills.append(self._hang_up)

    connected = property(lambda self: self._open and not self.broker.down)
    stalled_s = 0.0
    certificate_expiry = math.inf

    def _hang_up(self) -> None:
        self._open = False
        if self in self.broker.links:
            self.broker.links.remove(self)

    def reconnect(self) -> None:
        self.counters.reconnects += 1

    async def ask(
        self, name: str, request: Callable[[], T], deadline_s: float = CALL_S, poll_s: float = 0.0
    ) -> T:
        """Send a request until an answer comes. With `poll_s`, the broker keeps it so long if it has no answer yet."""
        loop = self.broker.loop
        deadline = loop.time() + deadline_s
        while True:
            attempt = Attempt(self, name, request, poll_s)
            try:
                async with asyncio.timeout(min(ANSWER_S + poll_s, deadline - loop.time())):
                    return await attempt.answer
            except TimeoutError:
                if loop.time() >= deadline:
                    raise BrokerUnreachable(f"no answer for {deadline_s} s ({name})") from None
            finally:
                attempt.withdraw()
            await asyncio.sleep(0.05)

    async def publish(
        self,
        subject: str,
        data: bytes,
        *,
        message_id: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> Stored:
        if len(data) > self.max_payload_bytes:
            raise RecordTooLarge(f"{len(data)} bytes for {subject}")
        data, sent = bytes(data), dict(headers or {})

        def request() -> Stored | None:
            try:
                return self.broker.publish(self.life, subject, data, message_id, sent)
            except Nothing:  # the log is full
                return None

        while (stored := await self.ask("publish", request, math.inf)) is None:
            self.counters.full_waits += 1
            await asyncio.sleep(0.5)
        return stored

    async def lease(self, timeout_s: float) -> "LinkedDelivery | None":
        loop = self.broker.loop
        deadline = loop.time() + timeout_s
        while (remaining := deadline - loop.time()) > 0:
            poll_s = min(remaining, PULL_S)
            with suppress(BrokerUnreachable):
                delivery = await self.ask(
                    "lease", lambda: self.broker.lease(self.life), poll_s + ANSWER_S, poll_s
                )
                self.counters.redelivered += delivery.deliveries > 1
                return LinkedDelivery(self, delivery)
        return None

    async def reader(
        self, stream: Stream, after: int, subject: str | None = None
    ) -> "LinkedReader":
        await asyncio.sleep(self.broker.storm.latency_s())
        return LinkedReader(self, stream, after, subject)

    async def last(self, stream: Stream, subject: str) -> Message | None:
        return await self._look("last", lambda memory: memory.last(stream, subject))

    async def extent(self, stream: Stream) -> Extent:
        return await self._look("extent", lambda memory: memory.extent(stream))

    async def queue(self) -> QueueState:
        return await self._look("queue", lambda memory: memory.queue())

    async def purge(self, stream: Stream, below: int, subject: str | None = None) -> None:
        await self.ask("purge", lambda: self.broker.purge(self.life, stream, below, subject))

    async def put(self, key: Key, data: bytes, after: int | None = None) -> int:
        broker, put_id = self.broker, self.broker.next_put()
        while True:
            expected = after if after is not None else await self.revision(key)
            revision = await self.ask(
                "put", lambda expected=expected: broker.put(self.life, key, data, expected, put_id)
            )
            if revision is not None:
                return revision
            # A repeat after a lost answer meets its own write.
            held = await self.revision(key)
            if broker.put_ids.get(held) == put_id:
                return held
            if after is not None and held != after:
                raise StateConflict(f"the key {key.value} has been set since revision {after}")
            await asyncio.sleep(PUT_PAUSE_S)

    async def get(self, key: Key) -> bytes | None:
        return await self._look("get", lambda memory: memory.get(key))

    async def revision(self, key: Key) -> int:
        return await self._look("revision", lambda memory: memory.revision(key))

    async def set_at(self, key: Key) -> float | None:
        return await self._look("set_at", lambda memory: memory.set_at(key))

    async def watch(self, key: Key) -> AsyncIterator[bytes]:
        seen = 0

        def news() -> tuple[int, bytes]:
            revision, data = self.broker.run.state.get(key, (0, b""))
            if revision == seen:
                raise Nothing
            return revision, data

        while True:
            with suppress(BrokerUnreachable):
                seen, data = await self.ask("watch", news, 60.0, 60.0)
                yield data

    async def close(self) -> None:
        self._hang_up()

    async def _look(self, name: str, read: Callable[[MemoryTransport], Any]) -> Any:
        return await self.ask(name, lambda: at_once(read(self.broker.memory)))


class LinkedReader:
    def __init__(self, link: Link, stream: Stream, after: int, subject: str | None) -> None:
        self._link, self._stream, self._subject = link, stream, subject
        self._after = after

    async def fetch(self, limit: int, timeout_s: float) -> list[Message]:
        link, memory = self._link, self._link.broker.memory
        held = link.broker.run.streams[self._stream]

        def request() -> list[Message]:
            check_gap(self._stream.value, self._after + 1, held.first_sequence, held.last_sequence)
            reader = MemoryReader(
                memory.server, held, self._stream.value, self._after, self._subject
            )
            if messages := reader._matching(link.broker.storm.batch(limit)):
                return messages
            raise Nothing

        try:
            # Also without time to wait, a request takes its way.
            messages = await link.ask("fetch", request, max(timeout_s, 0.5), timeout_s)
        except BrokerUnreachable:
            return []
        self._after = messages[-1].sequence
        return messages

    async def close(self) -> None: ...


@dataclass
class LinkedDelivery:
    link: Link
    delivery: MemoryDelivery

    def __post_init__(self) -> None:
        self.message, self.deliveries = self.delivery.message, self.delivery.deliveries

    async def extend(self) -> None:
        await self._say("extend", self.delivery.extend, self.link.ack_wait_s / 3)

    async def acknowledge(self) -> None:
        broker, life = self.link.broker, self.link.life

        def request() -> None:
            if self.message.sequence > broker.run.streams[Stream.TICKETS].last_sequence:
                raise Nothing  # nats-server does not answer for what it has lost
            at_once(self.delivery.acknowledge())
            broker.history.acknowledge(life, self.message)

        await self.link.ask("acknowledge", request, self.link.ack_wait_s)

    async def give_back(self, delay_s: float = 0.0) -> None:
        broker, life = self.link.broker, self.link.life

        def request() -> None:
            at_once(self.delivery.give_back(delay_s))
            broker.history.give_back(life, self.message, self.deliveries)

        await self.link.ask("give_back", request, self.link.ack_wait_s)

    async def _say(
        self, name: str, word: Callable[[], Coroutine[Any, Any, None]], deadline_s: float
    ) -> None:
        def request() -> None:
            try:
                at_once(word())
            except LeaseLost:
                # nats-server knows a ticket and not who holds it: it confirms whoever asks.
                if not self.link.broker.storm.profile.blind_leases:
                    raise

        await self.link.ask(name, request, deadline_s)
