"""A stream's messages in order, each asked for by its sequence: a reader leaves nothing on the server.

Whoever may publish may write headers that nats-py takes for a word of the server (`Status: 408`) or cannot parse (it
then drops the connection). So a message is asked for with STREAM.MSG.GET, in whose answer, which is JSON, the headers
travel inside. Only frames of weights, which are large and written by the learner alone, come as they are (DIRECT.GET).

A subscription that told of new messages would bring their headers too. So a reader looks again by itself: after a tenth
of the time that it has waited, which makes the wait at most a tenth longer.
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

from horizonrl.broker.api import Message
from horizonrl.broker.nats.link import Link
from horizonrl.common.errors import LogGap

AT_ONCE = 8
"""Messages asked for at the same time."""
SHARE = 0.1
SOONEST_S, LATEST_S = 0.01, 0.5
"""Between two looks: SHARE of the time waited so far, within these bounds."""
ANSWER_S = 5.0
DIRECT_ANSWER_S = 30.0
"""AT_ONCE chunks of weights may come over a slow line."""
NO_MESSAGE = 10037
"""JetStream's err_code for a stream that holds no such message; another 404 says that there is no such stream."""
PLACE = ("Nats-Stream", "Nats-Subject", "Nats-Sequence", "Nats-Time-Stamp")
"""Headers that the server adds to a message that comes as it is."""
Place = Mapping[str, object]
"""What JetStream's get requests take."""


def to_message(raw: Msg, prefix: str) -> Message:
    sequence = raw.metadata.sequence.stream or 0
    return Message(raw.subject.removeprefix(prefix), raw.data, sequence, dict(raw.headers or {}))


async def stored_message(link: Link, stream: str, prefix: str, place: Place) -> Message | None:
    """Return one message of a stream, or None; whatever its headers are, they reach nobody but this function.

    `place` is `{"last_by_subj": subject}`, or `{"seq": n, "next_by_subj": subject}` for the first from n on. Raises
    LogGap when there is no such stream.
    """
    (found,) = await stored_messages(link, stream, prefix, [place])
    return found


async def stored_messages(
    link: Link, stream: str, prefix: str, places: Sequence[Place], *, direct: bool = False
) -> list[Message | None]:
    """Return the messages at several places, which are asked for at the same time; of a stream whose writer is trusted
    with their headers, if it is `direct`."""
    call, answer_s = ("DIRECT.GET", DIRECT_ANSWER_S) if direct else ("STREAM.MSG.GET", ANSWER_S)
    read = _direct if direct else _wrapped

    async def one(place: Place) -> Message | None:
        request = link.client.request(f"$JS.API.{call}.{stream}", json.dumps(place).encode(), timeout=answer_s)
        return read(await request, prefix, link)

    async def answered() -> list[Message | None]:
        try:
            async with asyncio.TaskGroup() as group:
                asked = [group.create_task(one(place)) for place in places]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in asked]

    try:
        return await link.ask(answered)
    except nats.js.errors.NotFoundError:
        raise _gone(stream) from None


def _wrapped(answer: Msg, prefix: str, link: Link) -> Message | None:
    found = json.loads(answer.data)
    if error := found.get("error"):
        if error.get("err_code") == NO_MESSAGE:
            return None
        nats.js.errors.APIError.from_error(error)  # raises it
    stored = found["message"]
    _, _, lines = base64.b64decode(stored.get("hdrs", "")).partition(b"\r\n")
    headers = link.client._parse_header_lines(lines)
    data = base64.b64decode(stored.get("data", ""))
    return Message(stored["subject"].removeprefix(prefix), data, stored["seq"], headers, _seconds(stored["time"]))


def _direct(answer: Msg, prefix: str, link: Link) -> Message | None:
    headers = dict(answer.headers or {})
    if headers.get("Status") == "404":
        return None
    _, subject, sequence, time = (headers.pop(name) for name in PLACE)
    return Message(subject.removeprefix(prefix), answer.data, int(sequence), headers, _seconds(time))


def _seconds(rfc3339: str) -> float:
    """Return the server's nanosecond timestamp as seconds since the epoch."""
    return datetime.fromisoformat(f"{rfc3339[:19]}+00:00").timestamp()


def _gone(stream: str) -> LogGap:
    return LogGap(f"stream {stream} is gone: restore the broker's files or begin a new run")


class NatsReader:
    def __init__(self, link: Link, stream: str, subject: str, after: int, *, prefix: str, direct: bool = False) -> None:
        self._link = link
        self._js: JetStreamContext = link.client.jetstream()
        self._stream = stream
        self._subject = subject
        self._prefix = prefix
        self._direct = direct
        self._next = after + 1
        """Sequence from which the reader has seen nothing yet."""
        self._reconnects: int | None = None
        """When the stream was last seen to continue there."""

    async def fetch(self, limit: int, timeout_s: float) -> list[Message]:
        loop = asyncio.get_running_loop()
        began = loop.time()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not (messages := await self._look(limit)):
                    pause = SHARE * (loop.time() - began)
                    await asyncio.sleep(min(max(pause, SOONEST_S), LATEST_S))
                return messages
        return []

    async def _look(self, limit: int) -> list[Message]:
        """Return up to `limit` messages that are stored now.

        The place moves last, so that a caller whose time runs out in here has read nothing.
        """
        reconnects = self._link.counters.reconnects
        if self._reconnects != reconnects:
            await self._check_gap(self._next)
            self._reconnects = reconnects
        found = await self._from(self._next, 1)
        while found and len(found) < limit:
            more = await self._from(found[-1].sequence + 1, min(AT_ONCE, limit - len(found)))
            found += more
            if not more:
                break
        expected = (self._next, *(message.sequence + 1 for message in found))
        for wanted, message in zip(expected, found, strict=False):
            if message.sequence != wanted:
                await self._check_gap(wanted)
                break  # the first is the one that is purged first
        if found:
            self._next = found[-1].sequence + 1
        return found

    async def _from(self, first: int, count: int) -> list[Message]:
        """Return messages from a sequence on, each once: the first at or after it, and at or after the next ones.

        Where one is not there yet, the later ones wait too: it may have been stored since.
        """
        places = [{"seq": sequence, "next_by_subj": self._subject} for sequence in range(first, first + count)]
        return _in_order(await stored_messages(self._link, self._stream, self._prefix, places, direct=self._direct))

    async def _check_gap(self, wanted: int) -> None:
        """Raise LogGap unless the stream still holds, or is about to hold, the message at `wanted`.

        A jump alone proves nothing: a filtered reader skips other subjects, and a subject may be purged by itself.
        """
        try:
            state = (await self._link.ask(lambda: self._js.stream_info(self._stream))).state
        except nats.js.errors.NotFoundError:
            raise _gone(self._stream) from None
        check_gap(self._stream, wanted, state.first_seq, state.last_seq)

    async def close(self) -> None:
        """Nothing is held."""


def _in_order(answers: Sequence[Message | None]) -> list[Message]:
    found: list[Message] = []
    for message in answers:
        if message is None:
            break
        if not found or message.sequence > found[-1].sequence:
            found.append(message)
    return found


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
