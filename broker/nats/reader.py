"""A stream's messages in order, each requested by its sequence: a reader leaves nothing on the server.

Whoever may publish may write headers that nats-py mistakes for the server's own (`Status: 408`) or cannot parse (it
then drops the connection). So messages are requested with STREAM.MSG.GET, whose answer is JSON with the headers inside.
Only weights are requested as they are (DIRECT.GET): they are large, and only the learner writes them.

A subscription to new messages would deliver their headers too. So a reader polls: it looks again after a tenth of the
time that it has waited, which makes the wait at most a tenth longer.
"""

import asyncio
import base64
import contextlib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime

import nats.js.errors
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import StreamState

from horizonrl.broker.api import Message, check_gap
from horizonrl.broker.nats.connection import Connection
from horizonrl.broker.nats.freshness import Freshness
from horizonrl.common.errors import LogGap

REQUESTS_AT_ONCE = 64
"""For small messages. A reader of large ones fetches few at a time (`broker/scan.py`)."""
POLL_SHARE = 0.1
SOONEST_S, LATEST_S = 0.01, 0.5
"""Between two polls: POLL_SHARE of the time waited so far, within these bounds."""
ANSWER_S = 5.0
DIRECT_ANSWER_S = 30.0
"""Longer, because several chunks of weights may come over a slow line."""
LARGE_BYTES = 32_000
"""An answer above this is unpacked in a thread: JSON and base64 take 2 ms for 200 kB."""
NO_MESSAGE = 10037
"""JetStream's err_code for a stream that holds no such message. Another 404 means that there is no such stream."""
MESSAGE_ID = "Nats-Msg-Id"
"""The header in which JetStream expects a message's id."""
ADDED_HEADERS = ("Nats-Stream", "Nats-Subject", "Nats-Sequence", "Nats-Time-Stamp")
"""Headers that the server adds to the answer of DIRECT.GET."""
Query = Mapping[str, object]
"""The body of JetStream's get requests."""


def to_message(
    subject: str, data: bytes, sequence: int, headers: dict[str, str], stored_at: float | None = None
) -> Message:
    """Return a message of NATS as one of ours, with the id out of its header."""
    ours = {name: value for name, value in headers.items() if name != MESSAGE_ID}
    return Message(subject, data, sequence, headers.get(MESSAGE_ID), ours, stored_at)


async def stored_message(connection: Connection, stream: str, prefix: str, query: Query) -> Message | None:
    """Return one message of a stream, or None; the client does not see its headers, whatever they are.

    `query` is `{"last_by_subj": subject}`, or `{"seq": n, "next_by_subj": subject}` for the first one from n on. Raises
    LogGap if there is no such stream.
    """
    (found,) = await stored_messages(connection, stream, prefix, [query])
    return found


async def stored_messages(
    connection: Connection, stream: str, prefix: str, queries: Sequence[Query], *, direct: bool = False
) -> list[Message | None]:
    """Return the answers to several queries, which are sent at the same time.

    `direct` is four times as fast, but hands the messages' headers to the client: only for a stream whose writer is
    trusted with them.
    """
    call, answer_s = ("DIRECT.GET", DIRECT_ANSWER_S) if direct else ("STREAM.MSG.GET", ANSWER_S)
    read = _direct if direct else _wrapped
    subject = f"{connection.api(stream)}.{call}.{stream}"

    async def one(query: Query) -> Message | None:
        request = connection.client.request(subject, json.dumps(query).encode(), timeout=answer_s)
        answer = await request
        if not direct and len(answer.data) > LARGE_BYTES:
            return await asyncio.to_thread(read, answer, prefix, connection)
        return read(answer, prefix, connection)

    async def answered() -> list[Message | None]:
        # In one `ask`: a lost connection repeats the batch, and the answers stay in the order of the queries.
        # Not a TaskGroup: in Python 3.11, one whose child fails leaves its task marked as being cancelled (`cancelling`
        # stays 1), and the next `asyncio.timeout` around it raises CancelledError instead of TimeoutError.
        asked = [asyncio.create_task(one(query)) for query in queries]
        try:
            return await asyncio.gather(*asked)
        finally:
            for task in asked:
                task.cancel()
            await asyncio.wait(asked)

    try:
        return await connection.ask(answered)
    except nats.js.errors.NotFoundError:
        raise _gone(stream) from None


def _wrapped(answer: Msg, prefix: str, connection: Connection) -> Message | None:
    found = json.loads(answer.data)
    if error := found.get("error"):
        if error.get("err_code") == NO_MESSAGE:
            return None
        nats.js.errors.APIError.from_error(error)  # raises it
    stored = found["message"]
    # Stored headers begin with the protocol's version line, which the parser does not expect.
    _, _, lines = base64.b64decode(stored.get("hdrs", "")).partition(b"\r\n")
    # The client's own parser, so that a fetched message has the same headers as a delivered one.
    headers = connection.client._parse_header_lines(lines)
    data = base64.b64decode(stored.get("data", ""))
    return to_message(stored["subject"].removeprefix(prefix), data, stored["seq"], headers, _seconds(stored["time"]))


def _direct(answer: Msg, prefix: str, connection: Connection) -> Message | None:
    headers = dict(answer.headers or {})
    # A direct get is answered by a status instead of JSON.
    if headers.get("Status") == "404":
        return None
    # What is left then are the publisher's own headers.
    _stream, subject, sequence, time = (headers.pop(name) for name in ADDED_HEADERS)
    return to_message(subject.removeprefix(prefix), answer.data, int(sequence), headers, _seconds(time))


def _seconds(rfc3339: str) -> float:
    """Return the server's nanosecond timestamp as seconds since the epoch."""
    return datetime.fromisoformat(f"{rfc3339[:19]}+00:00").timestamp()


def _gone(stream: str) -> LogGap:
    return LogGap(f"stream {stream} is gone: restore the broker's files or begin a new run")


class NatsReader:
    def __init__(
        self,
        connection: Connection,
        place: tuple[str, str, str],
        after: int,
        freshness: Freshness,
        *,
        direct: bool = False,
    ) -> None:
        """`place` is a stream, a subject in it, and the prefix that the subjects of its messages are given without."""
        self._connection = connection
        self._js: JetStreamContext = connection.jetstream(place[0])
        self._stream, self._subject, self._prefix = place
        self._freshness = freshness
        self._direct = direct
        self._next = after + 1
        """Sequence from which the reader has seen nothing yet."""
        self._at_once = 1
        """Messages that are asked for together after the first one."""
        self._reconnects: int | None = None
        """The count of reconnects at which the stream was last seen to continue there."""

    async def fetch(self, limit: int, timeout_s: float) -> list[Message]:
        loop = asyncio.get_running_loop()
        began = loop.time()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not (messages := await self._look(limit)):
                    pause = POLL_SHARE * (loop.time() - began)
                    await asyncio.sleep(min(max(pause, SOONEST_S), LATEST_S))
                return messages
        return []

    async def _look(self, limit: int) -> list[Message]:
        """Return up to `limit` messages that are stored now.

        The position moves last, so that a caller whose time runs out in here has read nothing.
        """
        # Read before the check: a reconnect during the check makes the next look check again.
        reconnects = self._connection.counters.reconnects
        # A server that restarted may have lost its end or have another log, so the position is not trusted across it.
        if self._reconnects != reconnects:
            await self._check_gap(self._next)
            self._reconnects = reconnects
        # One request first: most looks of a reader that waits find nothing, and cost the server only this one.
        found = await self._from(self._next, 1)
        while found and len(found) < limit:
            more = await self._from(found[-1].sequence + 1, min(self._at_once, limit - len(found)))
            found += more
            # Twice as many while there are any: a reader that has caught up asks for one more message and not for many.
            self._at_once = min(2 * self._at_once, REQUESTS_AT_ONCE) if more else 1
            if not more:
                break
        # The sequence jumps over other subjects and over what was purged. Only the stream's extent tells the two apart.
        expected = (self._next, *(message.sequence + 1 for message in found))
        for wanted, message in zip(expected, found, strict=False):
            if message.sequence != wanted:
                await self._check_gap(wanted)
                break  # a purge takes the first messages first
        if found:
            self._next = found[-1].sequence + 1
            self._freshness.saw(self._stream, found[-1].sequence)
        return found

    async def _from(self, first: int, count: int) -> list[Message]:
        """Return messages from a sequence on, each once: the first one at or after each of the next `count` sequences.

        If one is not there yet, the later answers are left for the next call: it may have been stored since.
        """
        queries = [{"seq": sequence, "next_by_subj": self._subject} for sequence in range(first, first + count)]
        return _in_order(
            await stored_messages(self._connection, self._stream, self._prefix, queries, direct=self._direct)
        )

    async def _check_gap(self, wanted: int) -> None:
        """Raise LogGap unless the stream still holds the message at `wanted`, or will store it next.

        A jump in the sequence alone proves nothing: a filtered reader skips other subjects, and a subject may be purged
        by itself.
        """

        async def look() -> StreamState:
            return (await self._connection.ask(lambda: self._js.stream_info(self._stream))).state

        try:
            state = await self._freshness.at_least(self._stream, look, lambda state: state.last_seq, wanted - 1)
        except nats.js.errors.NotFoundError:
            raise _gone(self._stream) from None
        check_gap(self._stream, wanted, state.first_seq, state.last_seq)

    async def close(self) -> None:
        """Do nothing: the reader holds nothing."""


def _in_order(answers: Sequence[Message | None]) -> list[Message]:
    found: list[Message] = []
    for message in answers:
        if message is None:
            break
        # Two queries find the same message where the sequence of the first one has another subject.
        if not found or message.sequence > found[-1].sequence:
            found.append(message)
    return found
