"""The open tickets: where in the stream each lies whose end the learner has not consumed, and which have vanished.

Place in the flow: **Ticket** → audit and purge. The controller knows from its own publishes where its tickets lie. It
scans the stream once, and again only when the broker may hold something else. What is kept here are the open tickets,
so a look costs what is open and what has ended since the last look, and nothing at the broker.
"""

import asyncio
from bisect import insort
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import takewhile

from horizonrl.broker.api import Stream, Transport
from horizonrl.broker.codec import decode
from horizonrl.broker.tickets import REISSUED, TicketQueue, ticket_subject
from horizonrl.common.errors import LogGap, RecordError
from horizonrl.common.state import Progress
from horizonrl.common.types import Kind, Ticket

Name = tuple[Kind, int]
"""A ticket's kind and number."""


class OpenTickets:
    def __init__(self, transport: Transport, queue: TicketQueue) -> None:
        self._transport = transport
        self._queue = queue
        self._order: list[tuple[int, Kind, int, str]] = []
        """Sequence, kind, number and subject; ascending."""
        self._newest: dict[Name, int] = {}
        """The sequence of each ticket's newest copy."""
        self._last: dict[str, tuple[int, int]] = {}
        """By subject, the number and the sequence of its last ticket: of a kind, the one with the highest number. That
        is never purged, because `count_issued` reads it."""
        self._absent: set[Name] = set()
        """Tickets that should stand in the stream and did not when it was scanned."""
        self._purged: dict[str, int] = {}
        """By subject, the sequence below which tickets have been removed."""
        self._scanned_at: tuple[int, int] | None = None
        """The count of reconnects and the learner's lineage at the last scan; None before there was one."""
        self._refreshing = asyncio.Lock()
        self._foreign = 0
        """How often another controller's tickets were noticed."""

    def distrust(self) -> None:
        """Scan the stream again at the next `refresh`: another controller has issued tickets."""
        self._foreign += 1
        self._scanned_at = None

    def add(self, ticket: Ticket, sequence: int, subject: str | None = None) -> None:
        """Note where a ticket that was published lies; without `subject`, under that of its kind."""
        name, subject = (ticket.kind, ticket.number), subject or ticket_subject(ticket.kind)
        if self._newest.get(name, -1) < sequence:
            insort(self._order, (sequence, *name, subject))
            self._newest[name] = sequence
        # Tickets that are issued again have no order, and none of them has to stay.
        number = 0 if subject == REISSUED else ticket.number
        self._last[subject] = max(self._last.get(subject, (0, 0)), (number, sequence))
        self._absent.discard(name)

    async def refresh(
        self, progress: Progress, issued: dict[Kind, int], due: Mapping[Kind, int] = {}
    ) -> None:
        """Scan the stream if that has not been done, or if the broker may have lost what was there.

        Of the last tickets in `issued`, those that the broker has lost are owed as far as they are `due`. The others
        count as never issued: a store that went back has lost the credit for them, too.
        """
        async with self._refreshing:
            await self._refresh(progress, issued, due)

    async def _refresh(
        self, progress: Progress, issued: dict[Kind, int], due: Mapping[Kind, int]
    ) -> None:
        now = self._now(progress)
        if self._scanned_at == now:
            extent = await self._transport.extent(Stream.TICKETS)
            # A server that was restarted on another machine of a cluster breaks no connection of ours.
            if not self._order or self._order[-1][0] <= extent.last_sequence:
                return
        # Until the scan is complete, nothing may be purged by what is known so far.
        self._order, self._newest, self._scanned_at = [], {}, None
        # A broker that has lost its end gives these sequences to other tickets.
        self._last, self._purged = {}, {}
        foreign = self._foreign
        for message, ticket in await self._queue.stored_tickets():
            self.add(ticket, message.sequence, message.subject)
        owed: dict[Kind, int] = {}
        for kind, count in issued.items():
            number, _ = self._last.get(ticket_subject(kind), (-1, 0))
            bound = max(number + 1, due.get(kind, count))
            self._queue.forget_beyond(kind, bound)
            owed[kind] = min(count, bound)
        self._absent = {name for name in open_tickets(progress, owed) if name not in self._newest}
        if self._foreign == foreign:  # else one may have come after the end of this scan
            self._scanned_at = now

    def gone(self, progress: Progress, floor: int) -> set[Name]:
        """Return the open tickets that have left the queue.

        Every ticket at or below `floor` has been acknowledged. Forgets the tickets that have ended.
        """
        self._forget_ended(progress)
        acknowledged = takewhile(lambda entry: entry[0] <= floor, self._order)
        names = self._absent.union((kind, number) for _, kind, number, _ in acknowledged)
        return {name for name in names if progress.tells(*name)}

    async def stored(self, kind: Kind, number: int) -> tuple[int, Ticket] | None:
        """Return the newest copy of a ticket in the stream with its sequence; None if there is none."""
        if sequence := self._newest.get((kind, number)):
            reader = await self._transport.reader(Stream.TICKETS, sequence - 1)
            try:
                with suppress(RecordError, LogGap):  # a ticket that was purged is drawn again
                    for message in await reader.fetch(1, self._transport.ack_wait_s):
                        ticket = decode(message.data, Ticket)
                        return (
                            (sequence, ticket)
                            if (ticket.kind, ticket.number) == (kind, number)
                            else None
                        )
            finally:
                await reader.close()
        return None

    async def purge(self, progress: Progress) -> None:
        """Remove the tickets before the first one of their subject that has not ended, but never the last of a kind."""
        if self._scanned_at != self._now(progress):  # what is not known might be needed
            return
        self._forget_ended(progress)
        first: dict[str, int] = {}
        for sequence, _, _, subject in self._order:
            first.setdefault(subject, sequence)
        for subject, (_, last) in list(self._last.items()):
            # The last one that was issued again may go too: nothing is counted by that subject.
            most = last + 1 if subject == REISSUED else last
            sequence = min(first.get(subject, most), most)
            # Without something new to free, the request would be for nothing.
            if sequence > self._purged.get(subject, 1):
                await self._transport.purge(Stream.TICKETS, sequence, subject)
                self._purged[subject] = sequence

    def _now(self, progress: Progress) -> tuple[int, int]:
        """Return what a scan is good for: one connection, and one learner.

        A learner that resumes goes back, and tickets that had ended are open again.
        """
        return self._transport.counters.reconnects, progress.policy.lineage

    def _forget_ended(self, progress: Progress) -> None:
        self._order = [
            (sequence, kind, number, subject)
            for sequence, kind, number, subject in self._order
            if self._newest[kind, number] == sequence and not progress.ended(kind, number)
        ]
        self._newest = {(kind, number): sequence for sequence, kind, number, _ in self._order}
        self._absent = {name for name in self._absent if not progress.ended(*name)}


def open_tickets(progress: Progress, issued: dict[Kind, int]) -> Iterable[Name]:
    """Yield every issued ticket of which the progress says that it has not ended.

    It walks the gaps between the ended ranges, so it costs what is outstanding, however far apart that is.
    """
    for kind, count in issued.items():
        number = progress.lowest_unsettled.get(kind, 0)
        for first, last in progress.ended_ranges.get(kind, ()):
            yield from ((kind, index) for index in range(number, min(first, count)))
            number = max(number, last + 1)
        if progress.tells(kind, number):
            yield from ((kind, index) for index in range(number, count))
