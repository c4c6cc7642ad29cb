"""A stream's messages in order, through a pull consumer that is made anew whenever it may have lost a message.

The consumer takes no acknowledgements: the server forgets a message once it is sent, whether or not it arrived. So the
reader counts what arrives, and after a jump, a reconnect or a vanished consumer it starts again at its own place.

Whoever may publish may write headers that nats-py takes for a word of the server (`Status: 408`) or cannot parse (it
then drops the connection): such a message never arrives. So a pull that brought nothing is followed by a request for
the stored message itself, whose headers travel inside of the answer.
"""

import asyncio
import base64
import contextlib
import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import nats.errors
import nats.js.errors
from nats.aio.msg import Msg
from nats.js import JetStreamContext, api

from horizonrl.broker.api import Message
from horizonrl.broker.link import Link
from horizonrl.common.errors import BrokerUnreachable, LogGap

SLICE_S = 2.0
"""How long one pull request lives. A server that restarts forgets it, so that it is made again after this."""
CONSUMER_LIFE_S = 120.0
"""After so long without a pull the server removes the consumer; the reader then makes another."""
CLOSE_S = 5.0
ANSWER_S = 5.0


def to_message(raw: Msg, prefix: str) -> Message:
    sequence = raw.metadata.sequence.stream or 0
    return Message(raw.subject.removeprefix(prefix), raw.data, sequence, dict(raw.headers or {}))


async def stored_message(link: Link, stream: str, prefix: str, place: Mapping[str, object]) -> Message | None:
    """Return one message of a stream, or None; whatever its headers are, they reach nobody but this function.

    `place` is `{"last_by_subj": subject}`, or `{"seq": n, "next_by_subj": subject}` for the first from n on.
    """

    async def answered() -> Any:
        asked = f"$JS.API.STREAM.MSG.GET.{stream}", json.dumps(place).encode()
        answer = json.loads((await link.client.request(*asked, timeout=ANSWER_S)).data)
        if "error" in answer:
            nats.js.errors.APIError.from_error(answer["error"])  # raises it
        return answer["message"]

    try:
        found = await link.ask(answered)
    except nats.js.errors.NotFoundError:
        return None
    _, _, lines = base64.b64decode(found.get("hdrs", "")).partition(b"\r\n")
    headers = link.client._parse_header_lines(lines)  # as a pull's, so that a message is judged the same either way
    data = base64.b64decode(found.get("data", ""))
    return Message(found["subject"].removeprefix(prefix), data, found["seq"], headers, _seconds(found["time"]))


def _seconds(rfc3339: str) -> float:
    """Return the server's nanosecond timestamp as seconds since the epoch."""
    return datetime.fromisoformat(f"{rfc3339[:19]}+00:00").timestamp()


class NatsReader:
    def __init__(self, link: Link, stream: str, subject: str, after: int, *, prefix: str, gapless: bool = True) -> None:
        self._link = link
        self._js: JetStreamContext = link.client.jetstream()
        self._stream = stream
        self._subject = subject
        self._prefix = prefix
        self._gapless = gapless
        self._next = after + 1
        """Sequence from which the reader has seen nothing yet."""
        self._pulls: JetStreamContext.PullSubscription | None = None
        self._consumer: str | None = None
        self._arrived = 0
        """Messages that have come from the present consumer."""
        self._pulling = False
        """Of a pull that was cancelled, the server has sent messages that nobody has read and it will not repeat."""
        self._reconnects = 0

    async def fetch(self, limit: int, timeout_s: float) -> list[Message]:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while True:
                    if messages := await self._pull(limit) or await self._get(limit):
                        return messages
        return []

    async def _pull(self, limit: int) -> list[Message]:
        if self._pulls is None or self._pulling or self._reconnects != self._link.counters.reconnects:
            await self._begin()
        assert self._pulls is not None
        self._pulling = True
        try:
            async with self._link.while_connected():
                batch = await self._pulls.fetch(limit, SLICE_S)
        except TimeoutError:
            batch = []
        except (nats.js.errors.APIError, KeyError, ValueError):  # the last two: a status that no server has said
            await self._end()
            return []
        except nats.errors.ConnectionClosedError:
            self._link.raise_refusal()
            raise BrokerUnreachable(f"the connection to {self._link.url} is closed") from None
        taken = await self._take(batch)
        self._pulling = False
        return taken

    async def _get(self, limit: int) -> list[Message]:
        """Return the messages that are stored although a pull did not bring them, and go on after them."""
        got: list[Message] = []
        wanted = self._next
        while len(got) < limit:
            place = {"seq": wanted, "next_by_subj": self._subject}
            found = await stored_message(self._link, self._stream, self._prefix, place)
            if found is None:
                break
            if found.sequence != wanted:
                await self._check_gap(wanted)
            got.append(found)
            wanted = found.sequence + 1
        if got:
            await self._end()
            self._next = wanted  # only now: whoever is cancelled before has read nothing
        return got

    async def _take(self, batch: list[Msg]) -> list[Message]:
        """Return the messages that follow one another without a loss on the way.

        The place moves last, so that a caller whose time runs out in here has read nothing.
        """
        taken: list[Message] = []
        arrived, wanted = self._arrived, self._next
        for raw in batch:
            if raw.metadata.sequence.consumer != arrived + 1:
                await self._end()
                arrived = 0
                break
            message = to_message(raw, self._prefix)
            if message.sequence != wanted:
                await self._check_gap(wanted)
            arrived += 1
            wanted = message.sequence + 1
            taken.append(message)
        self._arrived, self._next = arrived, wanted
        return taken

    async def _begin(self) -> None:
        """Make a consumer at the reader's place."""
        await self._end()
        self._reconnects = self._link.counters.reconnects
        await self._check_gap(self._next)
        config = api.ConsumerConfig(
            deliver_policy=api.DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=self._next,
            ack_policy=api.AckPolicy.NONE,
            inactive_threshold=CONSUMER_LIFE_S,
            mem_storage=True,
        )
        self._pulls = await self._link.ask(
            lambda: self._js.pull_subscribe(self._subject, stream=self._stream, config=config)
        )
        self._consumer = config.name  # the client has chosen one

    async def _check_gap(self, wanted: int) -> None:
        """Raise LogGap unless the stream still holds, or is about to hold, the message at `wanted`.

        A jump alone proves nothing: a filtered reader skips other subjects, and a subject may be purged by itself.
        """
        if not self._gapless:
            return
        try:
            state = (await self._link.ask(lambda: self._js.stream_info(self._stream))).state
        except nats.js.errors.NotFoundError:
            raise LogGap(f"stream {self._stream} is gone: restore the broker's files or begin a new run") from None
        check_gap(self._stream, wanted, state.first_seq, state.last_seq)

    async def _end(self) -> None:
        """Let go of the consumer; the server removes it after CONSUMER_LIFE_S."""
        pulls, self._pulls, self._consumer, self._arrived = self._pulls, None, None, 0
        if pulls is not None:
            with contextlib.suppress(nats.errors.Error):
                await pulls.unsubscribe()

    async def close(self) -> None:
        """Remove the consumer: a server keeps only so many, and short readings are frequent."""
        consumer = self._consumer
        await self._end()
        if consumer is not None:
            with contextlib.suppress(nats.js.errors.Error, BrokerUnreachable):
                await self._link.ask(lambda: self._js.delete_consumer(self._stream, consumer), CLOSE_S)


def check_gap(stream: str, wanted: int, first: int, last: int) -> None:
    """Raise LogGap when a stream of `first` to `last` cannot continue at `wanted`."""
    if wanted < first:
        raise LogGap(
            f"{stream} begins at {first} but {wanted} is to be read next: it has been purged. Resume from a newer "
            "checkpoint, or begin a new run"
        )
    if wanted > last + 1:
        raise LogGap(
            f"{stream} ends at {last} but {wanted} is to be read next: this is not the log that was read before. "
            "Restore the broker's files, or begin a new run"
        )
