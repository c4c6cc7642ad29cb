"""The transport on NATS JetStream, for every real run.

Every request is repeated until the server has answered it (`connection.py`). The message id makes a repeated publish
harmless.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import nats.errors
import nats.js.errors
from nats.aio.msg import Msg
from nats.js import JetStreamContext

from horizonrl.broker.api import Extent, Key, Message, QueueState, Stored, Stream
from horizonrl.broker.nats.connection import CALL_DEADLINE_S, Connection, is_full
from horizonrl.broker.nats.reader import MESSAGE_ID, NatsReader, stored_message, to_message
from horizonrl.broker.nats.streams import ACTORS, UNLIMITED, bucket_name, news_subject, spec_of, stream_name
from horizonrl.common.errors import BrokerUnreachable, RecordTooLarge, StateConflict

HEADER_ROOM = 4_096
"""Bytes left for headers, which count towards the server's payload limit."""
ANSWER_S = 2.0
"""How long an attempt waits for its answer. An unneeded repeat is harmless, because it has the same message id."""
SECONDS_PER_MB = 1.0
"""Added to ANSWER_S for the data of a publish."""
SLICE_S = 2.0
"""How long one request for a ticket lives. A server that restarts forgets it, so it is made again after this time."""
REFRESH_S = 60.0
"""A watched key is read at least this often, in case its announcement was lost."""
WRONG_LAST_SEQUENCE = 10071
"""JetStream's err_code if a subject's last message is not the expected one."""


class NatsDelivery:
    def __init__(self, connection: Connection, raw: Msg, run: str, ack_wait_s: float) -> None:
        sequence = raw.metadata.sequence.stream or 0
        self.message = to_message(raw.subject.removeprefix(f"{run}."), raw.data, sequence, dict(raw.headers or {}))
        self.deliveries: int = raw.metadata.num_delivered or 1
        self._connection = connection
        self._reply = raw.reply
        self._ack_wait_s = ack_wait_s

    async def extend(self) -> None:
        # Given up after one period of the heartbeat, which then asks again (`Lease._extend`).
        await self._say(b"+WPI", self._ack_wait_s / 3)

    async def acknowledge(self) -> None:
        await self._say(b"+ACK")

    async def give_back(self, delay_s: float = 0.0) -> None:
        # JetStream counts the delay in nanoseconds.
        await self._say(b"-NAK " + json.dumps({"delay": int(delay_s * 1e9)}).encode())

    async def _say(self, word: bytes, deadline_s: float = CALL_DEADLINE_S) -> None:
        """Send an acknowledgement as a request, which the server confirms."""
        # If an acknowledgement were lost unnoticed, the lease would lapse and the ticket would be played again.
        await self._connection.ask(
            lambda: self._connection.client.request(self._reply, word, timeout=ANSWER_S),
            deadline_s,
            what=f"say {word[:4].decode()} of {self.message.subject}",
        )


class NatsTransport:
    def __init__(self, connection: Connection, run: str, ack_wait_s: float) -> None:
        self.run = run
        self.ack_wait_s = ack_wait_s
        self.counters = connection.counters
        # The server announces its limit when it accepts a connection, so a transport needs an open one.
        self.max_payload_bytes = connection.client.max_payload - HEADER_ROOM
        self._connection = connection
        self._js: JetStreamContext = connection.jetstream()
        self._leasing = asyncio.Lock()
        # Bound by the first `lease`: only an actor has the permission to request tickets (`access.py`).
        self._tickets: JetStreamContext.PullSubscription | None = None

    @property
    def connected(self) -> bool:
        return self._connection.client.is_connected

    @property
    def stalled_s(self) -> float:
        return self._connection.stalled_s

    async def publish(
        self, subject: str, data: bytes, *, message_id: str | None = None, headers: dict[str, str] | None = None
    ) -> Stored:
        if len(data) > self.max_payload_bytes:
            raise RecordTooLarge(f"{len(data)} bytes for {subject}: a message holds at most {self.max_payload_bytes}")
        sent = dict(headers or {})
        if message_id is not None:
            sent[MESSAGE_ID] = message_id
        return await self._store(f"{self.run}.{subject}", data, sent)

    async def _store(self, subject: str, data: bytes, headers: dict[str, str]) -> Stored:
        # A chunk of weights needs time on a slow line: after a fixed wait, every attempt would be given up halfway.
        answer_s = ANSWER_S + SECONDS_PER_MB * len(data) / 1e6

        async def attempt() -> Stored:
            try:
                ack = await self._js.publish(subject, data, timeout=answer_s, headers=headers or None)
            except nats.js.errors.APIError as error:
                # Counted at each attempt and raised again: the repeats of `ask` are the back-pressure.
                self.counters.full_waits += is_full(error)
                raise
            return Stored(ack.seq, bool(ack.duplicate))

        # No deadline: nothing may be dropped, so a publish waits for the server or for room as long as it takes.
        return await self._connection.ask(attempt, deadline_s=None, what=f"publish {subject}")

    async def lease(self, timeout_s: float) -> NatsDelivery | None:
        """One caller waits at a time: concurrent pulls on one subscription would take one another's answers."""
        with contextlib.suppress(TimeoutError):
            # The timeout is outside the lock, so that a caller that only waits for its turn returns in time too.
            async with asyncio.timeout(timeout_s), self._leasing:
                while True:
                    if (raw := await self._pull_ticket()) is not None:
                        delivery = NatsDelivery(self._connection, raw, self.run, self.ack_wait_s)
                        self.counters.redelivered += delivery.deliveries > 1
                        return delivery
        return None

    async def _pull_ticket(self) -> Msg | None:
        """Wait a short while for a ticket; the caller repeats it, because the server may have forgotten the request."""
        try:
            async with self._connection.while_connected():
                if self._tickets is None:
                    stream = stream_name(self.run, Stream.TICKETS)
                    self._tickets = await self._js.pull_subscribe_bind(ACTORS, stream=stream)
                # One at a time: the lease of each ticket in a batch would begin to run out before anyone works on it.
                return (await self._tickets.fetch(1, SLICE_S))[0]
        except TimeoutError:
            return None
        except nats.js.errors.ServiceUnavailableError:
            await asyncio.sleep(SLICE_S / 4)  # nobody answers for the consumer: its server is on its way up or down
            return None
        except nats.errors.ConnectionClosedError:
            # A key that is revoked closes the connection: the refusal says more than "closed".
            self._connection.raise_refusal()
            raise BrokerUnreachable(f"the connection to {self._connection.url} is closed") from None

    async def reader(self, stream: Stream, after: int, subject: str | None = None) -> NatsReader:
        spec = spec_of(stream)
        filtered = f"{self.run}.{subject or spec.subject}"
        name = stream_name(self.run, stream)
        return NatsReader(self._connection, name, filtered, after, prefix=f"{self.run}.", direct=spec.direct)

    async def last(self, stream: Stream, subject: str) -> Message | None:
        return await self._last(stream_name(self.run, stream), f"{self.run}.{subject}")

    async def _last(self, name: str, subject: str) -> Message | None:
        return await stored_message(self._connection, name, f"{self.run}.", {"last_by_subj": subject})

    async def extent(self, stream: Stream) -> Extent:
        name = stream_name(self.run, stream)
        js = self._connection.jetstream(name)
        found = await self._connection.ask(lambda: js.stream_info(name), what=f"look at {name}")
        # A stream without a limit has -1 here, or nothing.
        state, limit = found.state, found.config.max_bytes or UNLIMITED
        return Extent(state.first_seq, state.last_seq, state.messages, state.bytes, limit if limit > 0 else None)

    async def queue(self) -> QueueState:
        name = stream_name(self.run, Stream.TICKETS)
        consumer = await self._connection.ask(lambda: self._js.consumer_info(name, ACTORS), what=f"look at {name}")
        floor = consumer.ack_floor.stream_seq if consumer.ack_floor else 0
        return QueueState(consumer.num_pending or 0, consumer.num_ack_pending or 0, floor, consumer.num_waiting or 0)

    async def purge(self, stream: Stream, below: int, subject: str | None = None) -> None:
        if below <= 1:
            return  # to the server, 0 means "everything"
        name, filtered = stream_name(self.run, stream), subject and f"{self.run}.{subject}"
        # Safe to repeat, because it names a sequence and not a number of messages.
        purge = self._js.purge_stream
        await self._connection.ask(lambda: purge(name, seq=below, subject=filtered), what=f"purge {name}")

    async def put(self, key: Key, data: bytes, after: int | None = None) -> int:
        # JetStream's compare-and-set, on which "one learner speaks" rests (invariants).
        expected = {} if after is None else {"Nats-Expected-Last-Subject-Sequence": str(after)}
        try:
            # No message id: a new learner takes the key by setting the last value of the one before it again (ADR 10).
            return (await self._store(self._subject(key), data, expected)).sequence
        except nats.js.errors.APIError as error:
            if error.err_code != WRONG_LAST_SEQUENCE:
                raise
        # Without an id, a repeat after a lost answer meets its own write. Equal bytes tell it from another program's.
        entry = await self._last(f"KV_{bucket_name(self.run)}", self._subject(key))
        if entry is not None and entry.data == data:  # set by this call, whose answer was lost
            return entry.sequence
        raise StateConflict(
            f"the key {key.value} of run {self.run} has been set by another program since revision {after}"
        )

    async def get(self, key: Key) -> bytes | None:
        entry = await self._last(f"KV_{bucket_name(self.run)}", self._subject(key))
        return None if entry is None else entry.data

    async def revision(self, key: Key) -> int:
        entry = await self._last(f"KV_{bucket_name(self.run)}", self._subject(key))
        return 0 if entry is None else entry.sequence

    async def set_at(self, key: Key) -> float | None:
        entry = await self._last(f"KV_{bucket_name(self.run)}", self._subject(key))
        return None if entry is None else entry.stored_at

    async def watch(self, key: Key) -> AsyncIterator[bytes]:
        """The server announces on a separate subject that a key was set; the key's value is then read."""
        # Not the client's key-value watch: it creates a consumer, which only the controller may do (ADR 16).
        name, subject = f"KV_{bucket_name(self.run)}", self._subject(key)
        news = asyncio.Event()

        async def hear(_: Msg) -> None:
            news.set()

        # Subscribed before the first read, so that no value falls between the two.
        subscription = await self._connection.ask(
            lambda: self._connection.client.subscribe(news_subject(self.run, key.value), cb=hear)
        )
        seen = 0
        try:
            while True:
                # Before the read: news that comes during the read leads to another one.
                news.clear()
                entry = await self._last(name, subject)
                if entry is not None and entry.sequence != seen:
                    seen = entry.sequence
                    yield entry.data
                with contextlib.suppress(TimeoutError):  # also if the connection is lost, and with it perhaps some news
                    async with self._connection.while_connected(), asyncio.timeout(REFRESH_S):
                        await news.wait()
        finally:
            # A closed connection has no subscription left to end.
            with contextlib.suppress(nats.errors.Error):
                await subscription.unsubscribe()

    def _subject(self, key: Key) -> str:
        return f"$KV.{bucket_name(self.run)}.{key.value}"

    async def close(self) -> None:
        await self._connection.close()
