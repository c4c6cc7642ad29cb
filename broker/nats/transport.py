"""The transport on NATS JetStream: the one implementation that runs outside tests.

Every request is repeated until the server has answered (`link.py`); the message id makes a repeated publish harmless.
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
from horizonrl.broker.nats.link import CALL_DEADLINE_S, Link, is_full
from horizonrl.broker.nats.reader import NatsReader, stored_message, to_message
from horizonrl.broker.nats.streams import ACTORS, UNLIMITED, bucket_name, news_subject, spec_of, stream_name
from horizonrl.common.errors import BrokerUnreachable, RecordTooLarge, StateConflict

HEADER_ROOM = 4_096
"""The server's payload limit counts the headers too."""
ANSWER_S = 2.0
"""How long an attempt waits for its answer; with a message id, a repeat that was not needed is harmless."""
SECONDS_PER_MB = 1.0
SLICE_S = 2.0
"""How long one request for a ticket lives. A server that restarts forgets it, so that it is made again after this."""
LOOK_AGAIN_S = 60.0
"""A key is asked for at least so often, in case its news was lost on the way."""
WRONG_LAST_SEQUENCE = 10071
"""JetStream's err_code when a subject's last message is not the expected one."""


class NatsDelivery:
    def __init__(self, link: Link, raw: Msg, run: str, ack_wait_s: float) -> None:
        self.message = to_message(raw, f"{run}.")
        self.deliveries: int = raw.metadata.num_delivered or 1
        self._link = link
        self._reply = raw.reply
        self._ack_wait_s = ack_wait_s

    async def extend(self) -> None:
        await self._say(b"+WPI", self._ack_wait_s / 3)

    async def acknowledge(self) -> None:
        await self._say(b"+ACK")

    async def give_back(self, delay_s: float = 0.0) -> None:
        await self._say(b"-NAK " + json.dumps({"delay": int(delay_s * 1e9)}).encode())

    async def _say(self, word: bytes, deadline_s: float = CALL_DEADLINE_S) -> None:
        """Send an acknowledgement of one kind; the server confirms each that comes as a request."""
        await self._link.ask(
            lambda: self._link.client.request(self._reply, word, timeout=ANSWER_S),
            deadline_s,
            what=f"say {word[:4].decode()} of {self.message.subject}",
        )


class NatsTransport:
    def __init__(self, link: Link, run: str, ack_wait_s: float) -> None:
        self.run = run
        self.ack_wait_s = ack_wait_s
        self.counters = link.counters
        self.max_payload_bytes = link.client.max_payload - HEADER_ROOM
        self._link = link
        self._js: JetStreamContext = link.client.jetstream()
        self._leasing = asyncio.Lock()
        self._tickets: JetStreamContext.PullSubscription | None = None

    @property
    def connected(self) -> bool:
        return self._link.client.is_connected

    @property
    def stalled_s(self) -> float:
        return self._link.stalled_s

    async def publish(
        self, subject: str, data: bytes, *, message_id: str | None = None, headers: dict[str, str] | None = None
    ) -> Stored:
        if len(data) > self.max_payload_bytes:
            raise RecordTooLarge(f"{len(data)} bytes for {subject}: a message holds at most {self.max_payload_bytes}")
        sent = dict(headers or {})
        if message_id is not None:
            sent["Nats-Msg-Id"] = message_id
        return await self._store(f"{self.run}.{subject}", data, sent)

    async def _store(self, subject: str, data: bytes, headers: dict[str, str]) -> Stored:
        answer_s = ANSWER_S + SECONDS_PER_MB * len(data) / 1e6

        async def attempt() -> Stored:
            try:
                ack = await self._js.publish(subject, data, timeout=answer_s, headers=headers or None)
            except nats.js.errors.APIError as error:
                self.counters.full_waits += is_full(error)
                raise
            return Stored(ack.seq, bool(ack.duplicate))

        return await self._link.ask(attempt, deadline_s=None, what=f"publish {subject}")

    async def lease(self, timeout_s: float) -> NatsDelivery | None:
        """One lease is waited for at a time: concurrent pulls on one subscription would take one another's answers."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self._leasing:
                while True:
                    if (raw := await self._pull_ticket()) is not None:
                        delivery = NatsDelivery(self._link, raw, self.run, self.ack_wait_s)
                        self.counters.redelivered += delivery.deliveries > 1
                        return delivery
        return None

    async def _pull_ticket(self) -> Msg | None:
        """Wait a short while for a ticket; the server may forget the request, so that it is made again and again."""
        try:
            async with self._link.while_connected():
                if self._tickets is None:
                    stream = stream_name(self.run, Stream.TICKETS)
                    self._tickets = await self._js.pull_subscribe_bind(ACTORS, stream=stream)
                return (await self._tickets.fetch(1, SLICE_S))[0]
        except TimeoutError:
            return None
        except nats.js.errors.ServiceUnavailableError:
            await asyncio.sleep(SLICE_S / 4)  # nobody answers for the consumer: its server is on its way up or down
            return None
        except nats.errors.ConnectionClosedError:
            self._link.raise_refusal()
            raise BrokerUnreachable(f"the connection to {self._link.url} is closed") from None

    async def reader(self, stream: Stream, after: int, subject: str | None = None) -> NatsReader:
        spec = spec_of(stream)
        filtered = f"{self.run}.{subject or spec.subject}"
        name = stream_name(self.run, stream)
        return NatsReader(self._link, name, filtered, after, prefix=f"{self.run}.", direct=spec.direct)

    async def last(self, stream: Stream, subject: str) -> Message | None:
        return await self._last(stream_name(self.run, stream), f"{self.run}.{subject}")

    async def _last(self, name: str, subject: str) -> Message | None:
        return await stored_message(self._link, name, f"{self.run}.", {"last_by_subj": subject})

    async def extent(self, stream: Stream) -> Extent:
        name = stream_name(self.run, stream)
        found = await self._link.ask(lambda: self._js.stream_info(name), what=f"look at {name}")
        state, limit = found.state, found.config.max_bytes or UNLIMITED
        return Extent(state.first_seq, state.last_seq, state.messages, state.bytes, limit if limit > 0 else None)

    async def queue(self) -> QueueState:
        name = stream_name(self.run, Stream.TICKETS)
        consumer = await self._link.ask(lambda: self._js.consumer_info(name, ACTORS), what=f"look at {name}")
        floor = consumer.ack_floor.stream_seq if consumer.ack_floor else 0
        return QueueState(consumer.num_pending or 0, consumer.num_ack_pending or 0, floor, consumer.num_waiting or 0)

    async def purge(self, stream: Stream, below: int, subject: str | None = None) -> None:
        if below <= 1:
            return  # the server takes 0 for "everything"
        name, filtered = stream_name(self.run, stream), subject and f"{self.run}.{subject}"
        purge = self._js.purge_stream
        await self._link.ask(lambda: purge(name, seq=below, subject=filtered), what=f"purge {name}")

    async def put(self, key: Key, data: bytes, after: int | None = None) -> int:
        expected = {} if after is None else {"Nats-Expected-Last-Subject-Sequence": str(after)}
        try:
            return (await self._store(self._subject(key), data, expected)).sequence
        except nats.js.errors.APIError as error:
            if error.err_code != WRONG_LAST_SEQUENCE:
                raise
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
        """The server says on a subject of its own that a key has been set; what it holds then is asked for."""
        name, subject = f"KV_{bucket_name(self.run)}", self._subject(key)
        news = asyncio.Event()

        async def hear(_: Msg) -> None:
            news.set()

        heard = await self._link.ask(lambda: self._link.client.subscribe(news_subject(self.run, key.value), cb=hear))
        seen = 0
        try:
            while True:
                news.clear()
                entry = await self._last(name, subject)
                if entry is not None and entry.sequence != seen:
                    seen = entry.sequence
                    yield entry.data
                with contextlib.suppress(TimeoutError):  # also when the connection is lost, with it perhaps some news
                    async with self._link.while_connected(), asyncio.timeout(LOOK_AGAIN_S):
                        await news.wait()
        finally:
            with contextlib.suppress(nats.errors.Error):
                await heard.unsubscribe()

    def _subject(self, key: Key) -> str:
        return f"$KV.{bucket_name(self.run)}.{key.value}"

    async def close(self) -> None:
        await self._link.close()
