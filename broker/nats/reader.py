"""A stream's messages in order, each requested by its sequence: a reader leaves nothing on the server.

The first message of a look comes from the stream's leader, as JSON (STREAM.MSG.GET), and only the leader says that
there is none: another replica may be behind. The messages after it come as they are stored, many for one request (a
batch of DIRECT.GET, nats-server 2.11 or later), from any replica: whatever it holds has been agreed on.

Whoever may publish may write headers that nats-py mistakes for the server's own (`Status: 408`) or cannot parse (it
then drops the connection). In JSON they are inside. In a batch the server's own lines stand behind the publisher's, and
end the header block. What was stored always has these lines, and a status never has. So answers to a batch are
split here and not by nats-py. The first message of WEIGHTS comes by DIRECT.GET too: it is large, and only the learner
writes there.

A subscription to new messages would deliver their headers too. So a reader polls: it looks again after a tenth of the
time that it has waited, which makes the wait at most a tenth longer.
"""

import asyncio
import base64
import contextlib
import json
import re
from collections.abc import Mapping
from datetime import datetime

import nats.js.errors
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import StreamState

from horizonrl.broker.api import Message, check_gap
from horizonrl.broker.nats.connection import Connection
from horizonrl.broker.nats.freshness import Freshness
from horizonrl.common.errors import LogGap
from horizonrl.common.logs import get_logger

log = get_logger()

POLL_SHARE = 0.1
SOONEST_S, LATEST_S = 0.01, 0.5
"""Between two polls: POLL_SHARE of the time waited so far, within these bounds."""
ANSWER_S = 5.0
DIRECT_ANSWER_S = 30.0
"""Longer, because several chunks of weights may come over a slow line."""
LARGE_BYTES = 32_000
"""An answer above this is unpacked in a thread: JSON and base64 take 2 ms for 200 kB."""
BATCH_BYTES = 16 << 20
"""The server sends no further message of a batch above this: eight chunks of weights."""
NO_MESSAGE = 10037
"""JetStream's err_code for a stream that holds no such message. Another 404 means that there is no such stream."""
MESSAGE_ID = "Nats-Msg-Id"
"""The header in which JetStream expects a message's id."""
ADDED_HEADERS = ("Nats-Stream", "Nats-Subject", "Nats-Sequence", "Nats-Time-Stamp")
"""Headers that the server adds to the answer of DIRECT.GET."""
ADDED_LINES = re.compile(
    rb"(.*)Nats-Stream: \S+\r\nNats-Subject: (\S+)\r\nNats-Sequence: (\d+)\r\nNats-Time-Stamp: (\S+)\r\n"
    rb"(?:Nats-Num-Pending: \d+\r\nNats-Last-Sequence: (\d+)\r\n)?\r\n",
    re.DOTALL,
)
"""A header block that the server has added its lines to: the publisher's block without its last two bytes, subject,
sequence, time, and the sequence before it in the batch. nats-server 2.10 knows no batches and answers with one message,
without the last."""
Query = Mapping[str, object]
"""The body of JetStream's get requests."""


def to_message(
    subject: str,
    data: bytes,
    sequence: int,
    headers: dict[str, str],
    stored_at: float | None = None,
) -> Message:
    """Return a message of NATS as one of ours, with the id out of its header."""
    ours = {name: value for name, value in headers.items() if name != MESSAGE_ID}
    return Message(subject, data, sequence, headers.get(MESSAGE_ID), ours, stored_at)


async def stored_message(
    connection: Connection, stream: str, prefix: str, query: Query, *, direct: bool = False
) -> Message | None:
    """Return one message of a stream, or None; the client does not see its headers, whatever they are.

    `query` is `{"last_by_subj": subject}`, or `{"seq": n, "next_by_subj": subject}` for the first one from n on. With
    `direct`, the client sees the headers: only for a stream whose writer is trusted with them. Raises LogGap if there
    is no such stream.
    """
    call, answer_s = ("DIRECT.GET", DIRECT_ANSWER_S) if direct else ("STREAM.MSG.GET", ANSWER_S)
    read = _direct if direct else _unwrap
    subject, body = f"{connection.api(stream)}.{call}.{stream}", json.dumps(query).encode()

    async def one() -> Message | None:
        answer = await connection.client.request(subject, body, timeout=answer_s)
        if not direct and len(answer.data) > LARGE_BYTES:
            return await asyncio.to_thread(read, answer, prefix, connection)
        return read(answer, prefix, connection)

    try:
        return await connection.ask(one)
    except nats.js.errors.NotFoundError:
        raise missing_entries(stream) from None


async def add_batch(
    connection: Connection, stream: str, prefix: str, query: Query, messages: list[Message]
) -> None:
    """Append messages of a stream in order, `batch` at most, from any replica: perhaps none although there are some.

    `query` is `{"seq": n, "next_by_subj": subject, "batch": most}`. What has been appended when this is cancelled is
    whole and in order: over a slow line, a caller without time still gets on.
    """
    had = len(messages)
    subject, body = (
        f"{connection.api(stream)}.DIRECT.GET.{stream}",
        json.dumps({**query, "max_bytes": BATCH_BYTES}),
    )

    async def batch() -> None:
        del messages[had:]
        async with (
            connection.client.unread_answers() as (inbox, answers),
            asyncio.timeout(None) as patience,
        ):
            await connection.client.publish(subject, body.encode(), reply=inbox)
            while True:
                patience.reschedule(asyncio.get_running_loop().time() + DIRECT_ANSWER_S)
                headers, data = await answers.get()
                added = ADDED_LINES.fullmatch(headers)
                # A status: the end of the batch, nothing there, or nobody to answer. The next look asks the leader.
                if added is None:
                    return
                header, its_subject, sequence, time, before = added.groups()
                # An answer before this one is lost: from there on, the messages are requested again.
                if before not in (
                    None,
                    b"%d" % (messages[-1].sequence if len(messages) > had else 0),
                ):
                    return
                name = its_subject.decode().removeprefix(prefix)
                messages.append(
                    to_message(
                        name,
                        data,
                        int(sequence),
                        _parse(connection, header),
                        _seconds(time.decode()),
                    )
                )
                if before is None:
                    return

    await connection.ask(batch)


def _unwrap(answer: Msg, prefix: str, connection: Connection) -> Message | None:
    answer_body = json.loads(answer.data)
    if error := answer_body.get("error"):
        if error.get("err_code") == NO_MESSAGE:
            return None
        nats.js.errors.APIError.from_error(error)  # raises it
    stored = answer_body["message"]
    # Cut as the server cuts them in a batch: an entry's digest must not depend on how it was read.
    headers = _parse(connection, base64.b64decode(stored.get("hdrs", ""))[:-2])
    data = base64.b64decode(stored.get("data", ""))
    return to_message(
        stored["subject"].removeprefix(prefix),
        data,
        stored["seq"],
        headers,
        _seconds(stored["time"]),
    )


def _parse(connection: Connection, stored: bytes) -> dict[str, str]:
    """Return the headers of a stored block, which begins with the protocol's version line."""
    # The client's own parser, so that a fetched message has the same headers as a delivered one.
    parsed: dict[str, str] = connection.client._parse_header_lines(stored.partition(b"\r\n")[2])
    return parsed


def _direct(answer: Msg, prefix: str, connection: Connection) -> Message | None:
    headers = dict(answer.headers or {})
    # A direct get is answered by a status instead of JSON.
    if headers.get("Status") == "404":
        return None
    # What is left then are the publisher's own headers.
    _stream, subject, sequence, time = (headers.pop(name) for name in ADDED_HEADERS)
    return to_message(
        subject.removeprefix(prefix), answer.data, int(sequence), headers, _seconds(time)
    )


def _seconds(rfc3339: str) -> float:
    """Return the server's nanosecond timestamp as seconds since the epoch."""
    return datetime.fromisoformat(f"{rfc3339[:19]}+00:00").timestamp()


def missing_entries(stream: str) -> LogGap:
    return LogGap(f"stream {stream} is gone: restore the broker's files or begin a new run")


class NatsReader:
    def __init__(
        self,
        connection: Connection,
        source: tuple[str, str, str],
        after: int,
        freshness: Freshness,
        *,
        direct: bool = False,
        whole: bool = False,
    ) -> None:
        """`source` is a stream, a subject in it, and the prefix that the subjects of its messages are given without.

        With `whole`, every message of the stream has that subject, and only its first ones are ever purged.
        """
        self._connection = connection
        self._js: JetStreamContext = connection.jetstream(source[0])
        self._stream, self._subject, self._prefix = source
        self._freshness = freshness
        self._direct = direct
        self._whole = whole
        self._asked: dict[int, Message | None] = {}
        """What the leader holds where the present batch jumps; kept if the time for it runs out."""
        self._next = after + 1
        """Sequence from which the reader has seen nothing yet."""
        self._flowing = False
        """Whether the last look found a message, so that this one begins with a batch."""
        self._reconnects: int | None = None
        """The count of reconnects at which the stream was last seen to continue there."""

    async def fetch(self, limit: int, timeout_s: float) -> list[Message]:
        loop = asyncio.get_running_loop()
        began = loop.time()
        messages: list[Message] = []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not await self._look(limit, messages):
                    pause = POLL_SHARE * (loop.time() - began)
                    await asyncio.sleep(min(max(pause, SOONEST_S), LATEST_S))
        # Under a time limit of its own: the first one may have cut a batch short, and what has come of it is kept.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._move_behind(messages)
                return messages
        return []

    async def _look(self, limit: int, messages: list[Message]) -> bool:
        """Append up to `limit` messages that are stored now; return whether there are any."""
        # Read before the check: a reconnect during the check makes the next look check again.
        reconnects = self._connection.counters.reconnects
        # A server that restarted may have lost its end or have another log, so the position is not trusted across it.
        if self._reconnects != reconnects:
            await self._check_gap(self._next)
            self._reconnects = reconnects
        query: dict[str, object] = {"seq": self._next, "next_by_subj": self._subject}
        if not self._flowing:
            # The leader first: most looks of a reader that waits find nothing, and cost only this one request.
            first = await stored_message(
                self._connection, self._stream, self._prefix, query, direct=self._direct
            )
            if first is None:
                return False
            messages.append(first)
        if len(messages) < limit:
            query |= {"batch": limit - len(messages)} | (
                {"seq": messages[0].sequence + 1} if messages else {}
            )
            await add_batch(self._connection, self._stream, self._prefix, query, messages)
        self._flowing = bool(messages)
        return self._flowing

    async def _move_behind(self, messages: list[Message]) -> None:
        """Make the position that behind these messages. Raises LogGap if there were others before or between them."""
        # The sequence jumps over other subjects and over what was purged. Only the stream's extent tells the two apart.
        expected = (self._next, *(message.sequence + 1 for message in messages))
        for wanted, message in zip(expected, messages, strict=False):
            if message.sequence != wanted:
                await self._check_gap(wanted)
                if self._whole:
                    await self._complete(messages)
                break  # a purge takes the first messages first
        if messages:
            self._next = messages[-1].sequence + 1
            self._freshness.saw(self._stream, messages[-1].sequence)

    async def _complete(self, messages: list[Message]) -> None:
        """Add what a damaged replica has left out: the leader is asked for each message that is not there."""
        held = {message.sequence for message in messages}
        for sequence in range(self._next, messages[-1].sequence):
            if sequence not in held and sequence not in self._asked:
                query = {"seq": sequence}
                self._asked[sequence] = await stored_message(
                    self._connection, self._stream, self._prefix, query
                )
        left_out = [message for message in self._asked.values() if message is not None]
        self._asked = {}
        if left_out:
            log.warning(
                "replica_damaged",
                stream=self._stream,
                left_out=len(left_out),
                first=left_out[0].sequence,
            )
            messages[:] = sorted([*messages, *left_out], key=lambda message: message.sequence)

    async def _check_gap(self, wanted: int) -> None:
        """Raise LogGap unless the stream still holds the message at `wanted`, or will store it next.

        A jump in the sequence alone proves nothing: a filtered reader skips other subjects, and a subject may be purged
        by itself.
        """

        async def look() -> StreamState:
            return (await self._connection.ask(lambda: self._js.stream_info(self._stream))).state

        try:
            state = await self._freshness.at_least(
                self._stream, look, lambda state: state.last_seq, wanted - 1
            )
        except nats.js.errors.NotFoundError:
            raise missing_entries(self._stream) from None
        check_gap(self._stream, wanted, state.first_seq, state.last_seq)

    async def close(self) -> None:
        """Do nothing: the reader holds nothing."""
