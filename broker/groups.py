"""The group log: actors append to it, learners read it in order from their cursor.

Place in the flow: Episode → **Group** → Batch. A ticket ends once: its group and its void carry the same message id,
so that the second one is refused. A group too large for one message travels in parts (`groups.part`). They mean nothing
until the message that joins them (`groups.joined`) is stored under the ticket's id. That message in turn means nothing
if its parts were purged before it was stored: the next publisher then uses another id.
"""

import asyncio
import sys
from collections import deque
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import xxhash

from horizonrl.broker.api import Key, Message, Reader, Stored, Stream, Transport
from horizonrl.broker.codec import MAX_RECORD_BYTES, decode, encode
from horizonrl.broker.dead_letters import store_dead_letter
from horizonrl.broker.log_continuity import check_continuity, entry_digest
from horizonrl.broker.scan import BATCH_MESSAGES, scan
from horizonrl.broker.signing import TicketSigner
from horizonrl.broker.state import StateStore
from horizonrl.common.errors import (
    ConfigError,
    ForgedRecord,
    LogGap,
    MalformedRecord,
    PartsPurged,
    RecordError,
    RecordTooLarge,
    UnknownSchema,
)
from horizonrl.common.logs import get_logger
from horizonrl.common.state import Progress
from horizonrl.common.types import Group, Kind, Ticket, Void

log = get_logger()

VOID = "groups.void"
PART = "groups.part"
JOINED = "groups.joined"
REPEAT = ".again-"
"""Marks, in a message id, what is appended once more: a part that was purged before it was joined, or an end whose
predecessor ended nothing. The sequence of the first attempt follows."""
CHAIN = 4
"""Ends of one ticket that ended nothing, after which the next one is named after the learner's cursor."""
AGAIN_S, LONGEST_AGAIN_S = 0.01, 5.0
"""Wait before an end is published again, doubled with each attempt."""
ENDS = (*(f"groups.{kind.value}" for kind in Kind), VOID, JOINED)
"""The subjects whose messages end a ticket."""
PARTS = "Horizon-Parts"
DIGEST = "Horizon-Digest"
FIRST = "Horizon-First-Sequence"

LARGE_BYTES = 64_000
"""A record above this is decoded in a thread: it takes more than 1 ms, in which the event loop would answer nobody. The
hand-over to a thread and back costs as much as a third of decoding 27 kB."""

CAUSES: dict[type[RecordError], str] = {
    MalformedRecord: "malformed",
    UnknownSchema: "unknown_schema",
    RecordTooLarge: "too_large",
    ForgedRecord: "forged",
    PartsPurged: "purged",
}


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message of the log that is no valid record from an actor that was given the ticket; its bytes are in DEAD."""

    reason: str
    ticket_id: str | None = None
    """The ticket that it ends, if its message id proves that the sender had been given the ticket."""
    cause: str = "malformed"
    """One of the values of CAUSES, for the counter."""


@dataclass(frozen=True, slots=True)
class Entry:
    sequence: int
    record: Group | Void | DeadLetter
    digest: str = field(default="", compare=False)
    """Tells it from another entry that a broker may store at this sequence after a power cut (`continuity.py`)."""
    holes: tuple[tuple[int, int], ...] = field(default=(), compare=False)
    """First and last sequence of what the broker has lost between the entry before it and this one."""

    @property
    def ends(self) -> tuple[Kind, int] | None:
        """Kind and number of the ticket that it ends; None for a dead letter that ends no ticket."""
        if isinstance(self.record, DeadLetter):
            kind, _, number = (self.record.ticket_id or "").partition("-")
            return (Kind(kind), int(number)) if self.record.ticket_id else None
        return self.record.ticket.kind, self.record.ticket.number


class GroupLog:
    def __init__(self, transport: Transport, signer: TicketSigner | None = None) -> None:
        self._transport = transport
        self._signer = signer or TicketSigner(transport.run)
        """Readers check the tickets of the log with it."""
        self._room: int | None = None
        """Bytes that the log may hold; None before the first publish."""

    async def publish(self, group: Group) -> Stored:
        """Append a group, waiting while the log is full; `duplicate` means that its ticket had ended before.

        Raises ConfigError for a group that is larger than the whole log: waiting would not help.
        """
        data = encode(group)
        await self._check_size(group.ticket.ticket_id, len(data))
        return await self._end(group.ticket, f"groups.{group.ticket.kind.value}", data)

    async def _check_size(self, ticket_id: str, size: int) -> None:
        # Usually one request for the whole life of an actor: most groups are far smaller than the log.
        if self._room is None or size > self._room:  # an operator may have raised the limit since
            limit = (await self._transport.extent(Stream.GROUPS)).limit_bytes
            self._room = sys.maxsize if limit is None else limit
        if size > self._room:
            raise ConfigError(
                f"the group of {ticket_id} has {size} bytes, more than the whole group log may hold: "
                f"broker.max_log_bytes = {self._room}; raise it well above that, and start the controller again"
            )

    async def publish_void(self, void: Void) -> Stored:
        """End a ticket without a group."""
        return await self._end(void.ticket, VOID, encode(void))

    async def _end(self, ticket: Ticket, subject: str, data: bytes) -> Stored:
        """Append the message that ends a ticket; repeat until the learner can read the one that is stored."""
        message_id, attempts = ticket.end_id, 0
        # Conservation: a ticket whose stored end cannot be read would stay open for ever.
        while True:
            if len(data) > self._transport.max_payload_bytes:
                stored, readable = await self._publish_parts(ticket.end_id, message_id, data)
            else:
                stored, readable = (
                    await self._transport.publish(subject, data, message_id=message_id),
                    True,
                )
            failed = stored.sequence
            if stored.duplicate:
                readable = (cursor := await self._passed_over(ticket, stored)) is None
                # A learner that refused many ends in a row would make each one walk through all before it.
                failed = cursor if cursor is not None and attempts >= CHAIN else failed
            if readable:
                return stored
            if not attempts:
                log.warning(
                    "end_published_again", ticket=ticket.ticket_id, sequence=stored.sequence
                )
            # Named after the end that failed: every actor that sees it uses the same id, so only one ends the ticket.
            message_id = f"{ticket.end_id}{REPEAT}{failed}"
            await asyncio.sleep(min(AGAIN_S * 2**attempts, LONGEST_AGAIN_S))
            attempts += 1

    async def _passed_over(self, ticket: Ticket, stored: Stored) -> int | None:
        """Return the learner's cursor if it is beyond the stored end of this ticket and the ticket is still open.

        Then the learner refused that end, or its parts had been purged and its sender died: a living one would have
        published again.
        """
        progress = await StateStore(self._transport).get(Key.PROGRESS)
        if (
            isinstance(progress, Progress)
            and progress.cursor >= stored.sequence
            and not progress.ended(ticket.kind, ticket.number)
        ):
            return progress.cursor
        return None

    async def _publish_parts(
        self, end_id: str, message_id: str, data: bytes
    ) -> tuple[Stored, bool]:
        """Append the parts, then the message that joins them; return it, and whether the log then held every part.

        Nothing protects parts from a purge before they are joined. If an upload takes so long that a purge overtakes
        it, its parts are appended again. A part's id names the content, not only the ticket, because two actors may
        work on the same ticket, with different groups.
        """
        # Parts are stored one after the other: part 0 lies first, so while it is there, a purge has taken none of them.
        room, repeat = self._transport.max_payload_bytes, ""
        digest = xxhash.xxh3_128_hexdigest(data)
        while True:
            parts = [
                await self._transport.publish(
                    PART,
                    data[offset : offset + room],
                    message_id=f"{_upload(end_id, digest)}{index}{repeat}",
                )
                for index, offset in enumerate(range(0, len(data), room))
            ]
            first = parts[0].sequence
            if await self._holds(first):
                break
            # Under the old ids the server would take the parts for repeats, and store nothing.
            repeat = f"{REPEAT}{first}"
        headers = {PARTS: str(len(parts)), DIGEST: digest, FIRST: str(first)}
        joined = await self._transport.publish(JOINED, b"", message_id=message_id, headers=headers)
        # Once more: the purge may have come between the first look and the join.
        return joined, await self._holds(first)

    async def _holds(self, sequence: int) -> bool:
        return sequence >= (await self._transport.extent(Stream.GROUPS)).first_sequence

    async def read(self, after: int) -> "LogReader":
        """Read the entries that follow sequence `after`."""
        return LogReader(
            self._transport, await self._transport.reader(Stream.GROUPS, after), self._signer, after
        )

    async def end(self) -> int:
        """Return the sequence of the last entry, or 0 if the log has none."""
        newest = [await self._transport.last(Stream.GROUPS, subject) for subject in ENDS]
        return max((message.sequence for message in newest if message is not None), default=0)

    async def purge_below(self, sequence: int) -> None:
        """Remove what no entry from `sequence` on needs: parts of a group that is joined later may lie before it."""
        floor = sequence
        async with aclosing(scan(self._transport, Stream.GROUPS, sequence - 1, JOINED)) as joined:
            async for message in joined:
                first = _first_part(message)
                # Only a genuine join holds a purge back: with a forged one, any publisher could keep the whole log.
                if (
                    self._signer.ended_by(_first_id(message))
                    and first < floor
                    and await self._holds(first)
                ):
                    floor = first
        await self._transport.purge(Stream.GROUPS, below=floor)


class LogReader:
    """The entries of the log in order. The `sequence` of the last one that you settled is your cursor."""

    def __init__(
        self, transport: Transport, reader: Reader, signer: TicketSigner, after: int
    ) -> None:
        self._transport = transport
        self._reader = reader
        self._signer = signer
        self._ahead: deque[Message] = deque()
        self._next = after + 1
        """Sequence of the message that comes next."""
        self._holes: list[tuple[int, int]] = []
        """First and last sequence of what was missing since the last entry."""
        self._last: Message | None = None
        """The last message that was taken."""
        self.largest_bytes = 0
        """Size of the largest message so far. Most are small where large groups come in parts."""
        # A restarted broker may have lost its end, so the log is compared with what was read (`continuity.py`).
        self._reconnects = transport.counters.reconnects

    @property
    def ahead(self) -> int:
        """How many messages have been fetched and not returned yet."""
        return len(self._ahead)

    async def next(self, timeout_s: float) -> Entry | None:
        """Return the next entry, or None if `timeout_s` passes without one. Raises LogGap.

        A message that cannot be decoded is stored in DEAD, then returned as a DeadLetter so that the cursor passes it.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            if not self._ahead:
                self._ahead.extend(
                    await self._reader.fetch(BATCH_MESSAGES, max(0.0, deadline - loop.time()))
                )
                await self._check_continuity()
                self.largest_bytes = max(
                    [self.largest_bytes, *(len(message.data) for message in self._ahead)]
                )
            if not self._ahead:
                return None
            # It leaves the queue only after the awaits below: a call that is cancelled there loses nothing.
            message = self._ahead[0]
            # A part is read by the message that joins it; by itself it means nothing.
            entry = None if message.subject == PART else await self._entry(message)
            self._last = self._ahead.popleft()
            self._note_hole(message.sequence)
            if entry is not None:
                holes, self._holes = tuple(self._holes), []
                return replace(entry, holes=holes) if holes else entry

    async def close(self) -> None:
        await self._reader.close()

    def _note_hole(self, sequence: int) -> None:
        # Only the first messages are ever purged, and then the reader raises LogGap.
        if sequence > self._next:
            log.warning("log_hole", first=self._next, last=sequence - 1)
            self._holes.append((self._next, sequence - 1))
        self._next = sequence + 1

    async def _check_continuity(self) -> None:
        """Raise LogGap if the broker was away and came back without entries that were read before."""
        if self._reconnects != self._transport.counters.reconnects and self._last is not None:
            await check_continuity(self._transport, self._last.sequence, entry_digest(self._last))
        self._reconnects = self._transport.counters.reconnects

    async def _entry(self, message: Message) -> Entry:
        data, digest = message.data, entry_digest(message)
        try:
            if message.subject == JOINED:
                data = await self._join(message)
            record_type: type[Group] | type[Void] = Void if message.subject == VOID else Group
            # One at a time: with the objects of many groups alive, the garbage collector takes as long as decoding.
            if len(data) > LARGE_BYTES:
                record = await asyncio.to_thread(decode, data, record_type)
            else:
                record = decode(data, record_type)
                await asyncio.sleep(0)
            self._signer.verify(record.ticket)
        except RecordError as error:
            # Stored before the entry is returned: once the cursor has passed it, a purge may take the original.
            await store_dead_letter(self._transport, Stream.GROUPS, message, str(error), data)
            # A join whose parts were purged ends nothing, because its sender publishes the group again.
            ended = (
                None
                if isinstance(error, PartsPurged)
                else self._signer.ended_by(_first_id(message))
            )
            return Entry(
                message.sequence, DeadLetter(str(error), ended, CAUSES[type(error)]), digest
            )
        return Entry(message.sequence, record, digest)

    async def _join(self, message: Message) -> bytes:
        """Fetch the parts that a message joins.

        Raises PartsPurged if they were purged before it was stored: its sender, or the next one, publishes them again.
        Raises MalformedRecord if parts are missing for another reason, or do not have the announced digest.
        """
        end_id = _first_id(message)
        # Before anything is fetched: nobody without a ticket can make the learner read up to 64 MiB.
        if self._signer.ended_by(end_id) is None:
            raise ForgedRecord("joins parts under the id of no ticket that its sender was given")
        first, count = _first_part(message), _number(message, PARTS)
        # The headers are a stranger's words. The second bound keeps the map of wanted ids at 65,536 entries.
        if not 0 < first < message.sequence or not 0 < count <= MAX_RECORD_BYTES // 1024:
            raise MalformedRecord(f"joins {count} parts from sequence {first}: no such parts")
        upload = _upload(end_id, message.headers.get(DIGEST, ""))
        try:
            parts = await self._fetch_parts(
                first, message.sequence, {f"{upload}{i}": i for i in range(count)}
            )
        except LogGap:
            parts = {}
        # After the fetch: what is missing and lies below the start of the log by now has been purged.
        extent = await self._transport.extent(Stream.GROUPS)
        if len(parts) < count and first < extent.first_sequence:
            raise PartsPurged(
                f"joins parts from sequence {first}, and the log begins at {extent.first_sequence}"
            )
        data = b"".join(parts[index] for index in sorted(parts))
        if len(parts) < count or xxhash.xxh3_128_hexdigest(data) != message.headers.get(DIGEST):
            raise MalformedRecord(
                f"{len(parts)} of {count} parts found, or not with the digest announced"
            )
        return data

    async def _fetch_parts(
        self, first: int, before: int, wanted: dict[str, int]
    ) -> dict[int, bytes]:
        """Return the wanted parts between two sequences, by index. `wanted` gives the index for each message id."""
        parts: dict[int, bytes] = {}
        room = MAX_RECORD_BYTES
        # One at a time: a part is as large as a message may be, and the parts found so far are in memory too.
        async with aclosing(
            scan(self._transport, Stream.GROUPS, first - 1, PART, batch=1)
        ) as stored:
            async for message in stored:
                if message.sequence >= before:
                    break
                index = wanted.get(_first_id(message))
                if index is not None:
                    parts[index] = message.data
                    room -= len(message.data)
                # Parts that add up to more than a record may have are not worth fetching: no record can come of them.
                if len(parts) == len(wanted) or room < 0:
                    break
        return parts


def _upload(end_id: str, digest: str) -> str:
    """Return what the ids of all parts of an upload begin with."""
    return f"{end_id}.{digest[:16]}."


def _first_id(message: Message) -> str:
    """Return a message's id as it was at the first attempt: an end's id is then the ticket's end id."""
    return (message.message_id or "").partition(REPEAT)[0]


def _first_part(message: Message) -> int:
    return _number(message, FIRST)


def _number(message: Message, header: str) -> int:
    text = message.headers.get(header, "")
    # `int` alone would take signs, spaces and underscores. 15 digits stay below 2^53, as every count on the wire.
    return int(text) if text.isdecimal() and len(text) < 16 else 0
