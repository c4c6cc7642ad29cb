"""The ticket queue: the controller issues, actors lease (`leases.py`).

Place in the flow: **Ticket** → Episode. The stream itself is the record: the controller reads from it how many tickets
were issued, so it needs no memory of its own. A ticket's id makes issuing it twice harmless.
"""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing, suppress

from horizonrl.broker.api import Message, Stored, Stream, Transport
from horizonrl.broker.codec import decode, encode
from horizonrl.broker.dead_letters import store_dead_letter
from horizonrl.broker.leases import Lease, acknowledge
from horizonrl.broker.scan import scan
from horizonrl.broker.signing import TicketSigner
from horizonrl.common.errors import LogGap, RecordError
from horizonrl.common.types import Kind, Ticket

REISSUED = "tickets.again"
"""Subject of tickets that were issued again. It is not the subject of their kind, because the last message there tells
how many tickets of that kind were issued. That message may be lost: a ticket above what is left there is issued again
on the subject of its kind, so that it counts as issued."""
SCAN_BATCH = 256
"""Tickets are small, so that a scan may hold many of them."""
ISSUED_AT_ONCE = 64
"""Tickets whose requests are on their way together. One after the other, a second is good for 2,200 of them."""
LATEST = 16 * ISSUED_AT_ONCE
"""Messages up to the last one of a kind among which its highest number is. An old ticket is stored a second time only
by a controller that was paused for longer than the server remembers ids, and that asks before it issues others."""


class TicketQueue:
    def __init__(self, transport: Transport, signer: TicketSigner | None = None) -> None:
        self._transport = transport
        self._signer = signer or TicketSigner(transport.run)
        self._issued: dict[Kind, int] = {}
        """By kind, how many tickets are known to have been issued."""
        self._missing: dict[Kind, Sequence[int]] = {}
        self._read_to: dict[Kind, int] = {}
        """By kind, the sequence up to which its tickets have been counted."""

    async def issue(self, ticket: Ticket) -> Stored:
        """Publish a ticket; `duplicate` means that it had been issued before."""
        # Under the ticket's own id: if a controller that restarts repeats this, the server keeps one copy.
        data = encode(self._signer.sign(ticket))
        return await self._transport.publish(
            ticket_subject(ticket.kind), data, message_id=ticket.ticket_id
        )

    async def issue_all(self, tickets: Sequence[Ticket]) -> list[Stored]:
        """Publish tickets of one kind in the order of their numbers; return once each of them is stored.

        The requests of ISSUED_AT_ONCE tickets are sent together. If the caller dies among them, some are stored and
        lower ones may not be; `missing` tells which.
        """
        stored: list[Stored] = []
        for first in range(0, len(tickets), ISSUED_AT_ONCE):
            async with asyncio.TaskGroup() as group:
                issuing = [
                    group.create_task(self.issue(ticket))
                    for ticket in tickets[first : first + ISSUED_AT_ONCE]
                ]
            stored += [task.result() for task in issuing]
        if tickets:
            kind, number = tickets[-1].kind, tickets[-1].number
            self._issued[kind] = max(self._issued.get(kind, 0), number + 1)
        return stored

    async def reissue(self, ticket: Ticket, earlier: int) -> tuple[Stored, str]:
        """Publish a lost ticket again, under its own id; return where it is stored, and under which subject.

        `earlier` is the sequence of its newest copy, or of the stream's last message if there is none. Give tickets in
        the order of their numbers.
        """
        last = await self.last_issued(ticket.kind)
        counted = last is not None and ticket.number <= last.number
        subject = REISSUED if counted else ticket_subject(ticket.kind)
        # A message id of its own: the server remembers the ticket's first one for an hour, and would store nothing.
        data = encode(self._signer.sign(ticket))
        message_id = f"{ticket.ticket_id}.again-{earlier}"
        return await self._transport.publish(subject, data, message_id=message_id), subject

    async def count_issued(self, kind: Kind) -> int:
        """Return how many tickets of a kind were issued: the number of the next one.

        The last message need not have the highest number: tickets that were issued together are stored in any order,
        and one may be stored a second time. So what has been stored since the last count is read.
        """
        if kind not in self._issued:
            latest = await self._latest(kind)
            highest = max(latest, default=-1)
            lowest = max(0, highest - ISSUED_AT_ONCE)
            self._missing[kind] = [
                number for number in range(lowest, highest) if number not in latest
            ]
            self._issued[kind] = highest + 1
        ticket = await self.last_issued(kind)
        if ticket is not None and ticket.number >= self._issued[kind]:
            highest = max({ticket.number, *await self._latest(kind)})
            self._issued[kind] = max(self._issued[kind], highest + 1)
        return self._issued[kind]

    def known_issued(self, kind: Kind) -> int:
        """Return how many tickets of a kind are known to have been issued, without asking."""
        return self._issued.get(kind, 0)

    def forget_beyond(self, kind: Kind, count: int) -> None:
        """Know of no more than `count` tickets of a kind as issued: the broker has lost the others."""
        if count < self.known_issued(kind):
            self._issued[kind] = count

    def missing(self, kind: Kind) -> Sequence[int]:
        """Return the numbers below the highest one that the stream did not hold when the tickets were first counted.

        Their controller died while it issued several together, or they have been purged.
        """
        return self._missing.get(kind, ())

    async def _latest(self, kind: Kind) -> set[int]:
        """Return the numbers of a kind's tickets that were stored since the last call, up to the last one."""
        # Not up to the end of the stream: any number of another kind's tickets may follow.
        last = await self._transport.last(Stream.TICKETS, ticket_subject(kind))
        if last is None:
            return set()
        read_to = self._read_to.get(kind, 0)
        # A broker that has lost its end gives these sequences to other tickets.
        after = max(read_to if read_to < last.sequence else 0, last.sequence - LATEST)
        stored = await self._scan(ticket_subject(kind), after)
        self._read_to[kind] = last.sequence
        return {ticket.number for _, ticket in stored}

    async def last_issued(self, kind: Kind) -> Ticket | None:
        """Return the newest ticket of a kind; None if there is none, or if the last message is no ticket."""
        message = await self._transport.last(Stream.TICKETS, ticket_subject(kind))
        if message is not None:
            with suppress(RecordError):
                return decode(message.data, Ticket)
        return None

    async def was_issued(self, kind: Kind, number: int) -> bool:
        """Return whether a ticket was issued; ask the broker only for a number above those known to be issued."""
        # A signature that was verified proves it already (`LogReader` has done so).
        return (
            self._signer.signs
            or number < self._issued.get(kind, 0)
            or number < await self.count_issued(kind)
        )

    async def lease(self, timeout_s: float) -> Lease | None:
        """Return the next ticket under a lease, or None if `timeout_s` passes without one.

        A message that is no ticket is moved to DEAD.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while delivery := await self._transport.lease(max(0.0, deadline - loop.time())):
            try:
                ticket = decode(delivery.message.data, Ticket)
            except RecordError as error:
                # Stored before it is acknowledged: a crash in between repeats this, and DEAD keeps each message once.
                await store_dead_letter(
                    self._transport, Stream.TICKETS, delivery.message, str(error)
                )
                await acknowledge(delivery)
                continue
            return Lease(ticket, delivery.deliveries, delivery, self._transport.ack_wait_s)
        return None

    async def stored_tickets(self) -> list[tuple[Message, Ticket]]:
        """Return every ticket that the stream holds, with the message that it came in, in the order of issue."""
        return await self._scan("tickets.>")

    async def _scan(self, subject: str, after: int = 0) -> list[tuple[Message, Ticket]]:
        """Return the tickets of a subject after sequence `after`."""
        while True:
            with suppress(LogGap):  # a purge has overtaken the scan: begin again with what is left
                return await self._scan_once(subject, after)

    async def _scan_once(self, subject: str, after: int) -> list[tuple[Message, Ticket]]:
        # From what is left: a reader that begins at 0 would report the purged tickets as a gap.
        after = max(after, (await self._transport.extent(Stream.TICKETS)).first_sequence - 1)
        tickets: list[tuple[Message, Ticket]] = []
        async with aclosing(
            scan(self._transport, Stream.TICKETS, after, subject, SCAN_BATCH)
        ) as messages:
            async for message in messages:
                # Whoever leases it moves it to DEAD. To a scan it is no ticket.
                with suppress(RecordError):
                    tickets.append((message, decode(message.data, Ticket)))
        return tickets


def ticket_subject(kind: Kind) -> str:
    return f"tickets.{kind.value}"
