"""The transport on NATS JetStream, for every real run.

Every request is repeated until the server has answered it (`connection.py`). The message id makes a repeated publish
harmless.
"""

import asyncio
import contextlib
import json
import math
import random
import ssl
import time
import uuid
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import nats.errors
import nats.js.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js import JetStreamContext
from nats.js.api import StreamInfo

from horizonrl.broker.api import Extent, Key, Message, QueueState, Stored, Stream
from horizonrl.broker.nats.connection import Connection, is_full
from horizonrl.broker.nats.freshness import Freshness
from horizonrl.broker.nats.reader import (
    MESSAGE_ID,
    NatsReader,
    missing_entries,
    stored_message,
    to_message,
)
from horizonrl.broker.nats.streams import (
    ACTORS,
    UNLIMITED,
    bucket_name,
    news_subject,
    stream_name,
    stream_spec,
)
from horizonrl.common.errors import BrokerUnreachable, LogGap, RecordTooLarge, StateConflict

HEADER_ROOM = 4_096
"""Bytes left for headers, which count towards the server's payload limit."""
ANSWER_S = 2.0
"""How long an attempt waits for its answer. An unneeded repeat is harmless, because it has the same message id."""
SECONDS_PER_MB = 1.0
"""Added to ANSWER_S for the data of a publish."""
REQUEST_S = (30.0, 40.0)
"""How long one request for a ticket lives: a random time between these, so that 10,000 actors that began together do
not ask together for ever. An idle actor costs 0.06 messages per second. A lost connection ends a request early. An
account takes the answer of another one for a minute, so it must be shorter. It ends at a whole second of the clock:
with each request that comes or ends, the server looks at all that wait (`processWaiting` of nats-server 2.15), which
grows with the square of the idle actors. Those that end together cost it few such looks."""
REFUSED_S = (0.5, 2.0)
"""Wait before a request that the consumer's server refused is made again."""
REFRESH_S = (60.0, 120.0)
"""A watched key is read at least this often, in case its announcement was lost."""
WRONG_LAST_SEQUENCE = (10071, 10164)
"""JetStream's err_codes if a subject's last message is not the expected one, or if a cluster is agreeing on another."""
EXPECTED = "Nats-Expected-Last-Subject-Sequence"
PUT_ID = "Horizon-Put"
"""The header that tells a put's own write from another program's. It is no message id: the server would then ignore a
learner that takes the key by setting the last value of the one before it again (ADR 10)."""
PUT_PAUSE_S = 0.1


class NatsDelivery:
    def __init__(self, connection: Connection, raw: Msg, run: str, ack_wait_s: float) -> None:
        sequence = raw.metadata.sequence.stream or 0
        self.message = to_message(
            raw.subject.removeprefix(f"{run}."), raw.data, sequence, dict(raw.headers or {})
        )
        self.deliveries: int = raw.metadata.num_delivered or 1
        self._connection = connection
        self._reply = raw.reply
        self._ack_wait_s = ack_wait_s

    async def extend(self) -> None:
        # Given up after one period of the heartbeat, which then asks again (`Lease._extend`).
        await self._say(b"+WPI", self._ack_wait_s / 3)

    async def acknowledge(self) -> None:
        await self._say(b"+ACK", self._ack_wait_s)

    async def give_back(self, delay_s: float = 0.0) -> None:
        # JetStream counts the delay in nanoseconds.
        await self._say(
            b"-NAK " + json.dumps({"delay": int(delay_s * 1e9)}).encode(), self._ack_wait_s
        )

    async def _say(self, word: bytes, deadline_s: float) -> None:
        """Send an acknowledgement as a request, which the server confirms: not if it has lost ticket or consumer."""
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
        self._freshness = Freshness(connection.clustered)
        self._leasing = asyncio.Lock()
        # Bound by the first `lease`: only an actor has the permission to request tickets (`access.py`).
        tickets = stream_name(run, Stream.TICKETS)
        self._next_ticket = f"{connection.api(tickets)}.CONSUMER.MSG.NEXT.{tickets}.{ACTORS}"
        self._tickets: Subscription | None = None
        self._saying: set[asyncio.Task[None]] = set()
        """What is being sent without an answer."""

    @property
    def connected(self) -> bool:
        return self._connection.client.is_connected

    @property
    def stalled_s(self) -> float:
        return self._connection.stalled_s

    @property
    def certificate_expiry(self) -> float:
        # A connection keeps the certificate that it was opened with, though the server may have a newer one by now.
        writer = self._connection.client.writer
        shown = writer.get_extra_info("peercert") if writer is not None else None
        return float(ssl.cert_time_to_seconds(shown["notAfter"])) if shown else math.inf

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
        sent = dict(headers or {})
        if message_id is not None:
            sent[MESSAGE_ID] = message_id
        return await self._store(f"{self.run}.{subject}", data, sent)

    async def _store(self, subject: str, data: bytes, headers: dict[str, str]) -> Stored:
        # A chunk of weights needs time on a slow line: after a fixed wait, every attempt would be given up halfway.
        answer_s = ANSWER_S + SECONDS_PER_MB * len(data) / 1e6

        async def attempt() -> Stored:
            try:
                ack = await self._js.publish(
                    subject, data, timeout=answer_s, headers=headers or None
                )
            except nats.js.errors.APIError as error:
                # Counted at each attempt and raised again: the repeats of `ask` are the back-pressure.
                self.counters.full_waits += is_full(error)
                raise
            self._freshness.saw(ack.stream, ack.seq)
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
        """Wait for a ticket for as long as one request lives; return None if the caller has to ask again."""
        # Not the client's `fetch`, which goes on waiting after the server has ended a request with a 409.
        answered, client = False, self._connection.client
        now = time.time()
        lives_s = math.ceil(now + random.uniform(*REQUEST_S)) - now
        try:
            async with self._connection.while_connected():
                if self._tickets is None:
                    self._tickets = await client.subscribe(client.new_inbox())
                # One at a time: the leases of a batch would begin to run out before anyone works on them.
                request = json.dumps({"batch": 1, "expires": int(lives_s * 1e9)}).encode()
                await client.publish(self._next_ticket, request, reply=self._tickets.subject)
                raw = await self._tickets.next_msg(timeout=lives_s + ANSWER_S)
                answered = True
        except TimeoutError:  # the connection is lost, or the server has lost the request
            return None
        except nats.errors.ConnectionClosedError:
            # A key that is revoked closes the connection: the refusal says more than "closed".
            self._connection.raise_refusal()
            raise BrokerUnreachable(f"the connection to {self._connection.url} is closed") from None
        finally:
            if not answered:
                self._withdraw()
        # A ticket comes with the subject of its lease, and a status without one.
        if raw.reply:
            return raw
        # 408: the request has lived its time. Otherwise nobody answers for the consumer (503), its leader has changed,
        # or too many wait (409): its server is on its way up or down.
        if (raw.headers or {}).get("Status") != "408":
            await asyncio.sleep(random.uniform(*REFUSED_S))
        return None

    def _withdraw(self) -> None:
        """End the request for a ticket that nobody waits for any more: the server gives a ticket only to a listener.

        Otherwise the next ticket would go to this actor within REQUEST_S, although it drains, and lie until `ack_wait`.
        """
        tickets, self._tickets = self._tickets, None
        if tickets is None:
            return
        queue = tickets._pending_queue  # what has arrived already goes back at once
        while not queue.empty():
            raw = queue.get_nowait()
            if raw.reply:
                self._say_later(raw.respond(b"-NAK"))
        self._say_later(tickets.unsubscribe())

    def _say_later(self, words: Coroutine[Any, Any, None]) -> None:
        """Send something that needs no answer and that no caller should wait for, as while it is being cancelled."""

        async def say() -> None:
            # A closed connection has nothing left to withdraw.
            with contextlib.suppress(nats.errors.Error):
                await words

        self._saying.add(task := asyncio.create_task(say()))
        task.add_done_callback(self._saying.discard)

    async def reader(self, stream: Stream, after: int, subject: str | None = None) -> NatsReader:
        spec = stream_spec(stream)
        filtered = f"{self.run}.{subject or spec.subject}"
        name = stream_name(self.run, stream)
        source = (name, filtered, f"{self.run}.")
        whole = stream is Stream.GROUPS and subject is None
        return NatsReader(
            self._connection, source, after, self._freshness, direct=spec.direct, whole=whole
        )

    async def last(self, stream: Stream, subject: str) -> Message | None:
        query = {"last_by_subj": f"{self.run}.{subject}"}
        return await stored_message(
            self._connection, stream_name(self.run, stream), f"{self.run}.", query
        )

    async def _entry(self, key: Key, wanted: int = 0) -> Message | None:
        """Return a key's last value, never one older than `wanted` or than one seen before (`freshness.py`)."""
        name, subject = f"KV_{bucket_name(self.run)}", self._subject(key)

        async def look() -> Message | None:
            return await stored_message(
                self._connection, name, f"{self.run}.", {"last_by_subj": subject}
            )

        return await self._freshness.at_least(
            subject, look, lambda entry: entry.sequence if entry else 0, wanted
        )

    async def extent(self, stream: Stream) -> Extent:
        name = stream_name(self.run, stream)
        js = self._connection.jetstream(name)

        async def look() -> StreamInfo:
            try:
                return await self._connection.ask(
                    lambda: js.stream_info(name), what=f"look at {name}"
                )
            except nats.js.errors.NotFoundError:
                raise missing_entries(name) from None

        status = await self._freshness.at_least(name, look, lambda info: info.state.last_seq)
        # A stream without a limit has -1 here, or nothing.
        state, limit = status.state, status.config.max_bytes or UNLIMITED
        return Extent(
            state.first_seq,
            state.last_seq,
            state.messages,
            state.bytes,
            limit if limit > 0 else None,
        )

    async def leader(self, stream: Stream | None) -> str | None:
        """Return the name of the server that leads a stream, or the keys (None), in a cluster; None without one."""
        name = f"KV_{bucket_name(self.run)}" if stream is None else stream_name(self.run, stream)
        info = await self._connection.ask(
            lambda: self._js.stream_info(name), what=f"look at {name}"
        )
        return info.cluster.leader if info.cluster else None

    async def queue(self) -> QueueState:
        name = stream_name(self.run, Stream.TICKETS)
        try:
            consumer = await self._connection.ask(
                lambda: self._js.consumer_info(name, ACTORS), what=f"look at {name}"
            )
        except nats.js.errors.NotFoundError:
            raise LogGap(
                f"the consumer {ACTORS} of {name} is gone: a controller makes it again when it starts"
            ) from None
        floor = consumer.ack_floor.stream_seq if consumer.ack_floor else 0
        return QueueState(
            consumer.num_pending or 0,
            consumer.num_ack_pending or 0,
            floor,
            consumer.num_waiting or 0,
        )

    async def purge(self, stream: Stream, below: int, subject: str | None = None) -> None:
        if below <= 1:
            return  # to the server, 0 means "everything"
        name, filtered = stream_name(self.run, stream), subject and f"{self.run}.{subject}"
        # Safe to repeat, because it names a sequence and not a number of messages.
        purge = self._js.purge_stream
        try:
            await self._connection.ask(
                lambda: purge(name, seq=below, subject=filtered), what=f"purge {name}"
            )
        except nats.js.errors.NotFoundError:
            raise missing_entries(name) from None

    async def put(self, key: Key, data: bytes, after: int | None = None) -> int:
        # JetStream's compare-and-set, on which "one learner speaks" rests (invariants). An unconditional put names the
        # present revision: an attempt that a paused server still holds must not undo later puts when it comes back.
        put_id, conditional, subject = uuid.uuid4().hex, after is not None, self._subject(key)
        while True:
            expected = after if after is not None else await self.revision(key)
            try:
                sequence = (
                    await self._store(subject, data, {EXPECTED: str(expected), PUT_ID: put_id})
                ).sequence
            except nats.js.errors.APIError as error:
                if error.err_code not in WRONG_LAST_SEQUENCE:
                    raise
            else:
                self._freshness.saw(subject, sequence)
                return sequence
            # A repeat after a lost answer meets its own write.
            entry = await self._entry(key, expected)
            if entry is not None and entry.headers.get(PUT_ID) == put_id:
                return entry.sequence
            if conditional and (entry.sequence if entry else 0) != expected:
                raise StateConflict(
                    f"the key {key.value} of run {self.run} has been set by another program since revision {after}"
                )
            # The key is as expected: the refusal came from a leader that was being replaced, or an attempt of this put
            # is still being agreed on.
            await asyncio.sleep(PUT_PAUSE_S)

    async def get(self, key: Key) -> bytes | None:
        entry = await self._entry(key)
        return None if entry is None else entry.data

    async def revision(self, key: Key) -> int:
        entry = await self._entry(key)
        return 0 if entry is None else entry.sequence

    async def set_at(self, key: Key) -> float | None:
        entry = await self._entry(key)
        return None if entry is None else entry.stored_at

    async def watch(self, key: Key) -> AsyncIterator[bytes]:
        """The server announces on a separate subject that a key was set; the key's value is then read."""
        # Not the client's key-value watch: it creates a consumer, which only the controller may do (ADR 16).
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
                entry = await self._entry(key)
                if entry is not None and entry.sequence != seen:
                    seen = entry.sequence
                    yield entry.data
                # Also if the connection is lost, and with it perhaps some news.
                with contextlib.suppress(TimeoutError):
                    async with (
                        self._connection.while_connected(),
                        asyncio.timeout(random.uniform(*REFRESH_S)),
                    ):
                        await news.wait()
        finally:
            # A closed connection has no subscription left to end.
            with contextlib.suppress(nats.errors.Error):
                await subscription.unsubscribe()

    def _subject(self, key: Key) -> str:
        return f"$KV.{bucket_name(self.run)}.{key.value}"

    async def close(self) -> None:
        if self._saying and self.connected:
            await asyncio.wait(self._saying, timeout=ANSWER_S)
        await self._connection.close()
