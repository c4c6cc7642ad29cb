"""The ticket queue: the controller issues, actors lease.

Place in the flow: **Ticket** → Episode. The stream itself is the record: the controller reads from it how many tickets
were issued, so it needs no memory of its own. A ticket's id makes issuing it twice harmless.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass

from horizonrl.broker.api import Delivery, Stream, Transport
from horizonrl.broker.codec import decode, encode
from horizonrl.broker.dead_letters import store_dead_letter
from horizonrl.broker.scan import scan
from horizonrl.broker.signing import TicketSigner
from horizonrl.common.errors import BrokerError, LeaseLost, LogGap, RecordError
from horizonrl.common.logs import get_logger
from horizonrl.common.types import Kind, Ticket

log = get_logger()

REISSUED = "tickets.again"
"""Subject of tickets that were issued again. It is not the subject of their kind, because the last message there tells
how many tickets of that kind were issued."""
SCAN_BATCH = 256
"""Tickets are small, so that a scan may hold many of them."""


@dataclass(frozen=True, slots=True)
class Lease:
    """An actor's hold on a ticket.

    Work inside `held()`, publish inside `kept()`, then `acknowledge`; or `give_back` at any time.
    """

    ticket: Ticket
    deliveries: int
    """1 if nobody has held the ticket before."""
    delivery: Delivery
    ack_wait_s: float

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Extend the lease every third of `ack_wait_s` while the body runs.

        Cancels the body and raises LeaseLost if no extension was confirmed for `ack_wait_s`: by then another actor may
        have the ticket.
        """
        try:
            # The heartbeat is inside, so that it has ended before the deadline that it moves does.
            async with asyncio.timeout(self.ack_wait_s) as deadline, self._extended(deadline):
                yield
        except TimeoutError:
            # A TimeoutError of the body's own is not a lost lease.
            if deadline.expired():
                raise LeaseLost(
                    f"{self.ticket.ticket_id}: no extension was confirmed for {self.ack_wait_s} s; another actor may "
                    "have it"
                ) from None
            raise

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Extend the lease while the body runs, without ever cancelling it.

        For a finished group: it is worth publishing however long the broker is away, and a second one is refused.
        """
        async with self._extended(None):
            yield

    @asynccontextmanager
    async def _extended(self, deadline: asyncio.Timeout | None) -> AsyncIterator[None]:
        # Not a TaskGroup, which would wrap the body's errors in a group: callers catch them by type.
        heartbeat = asyncio.create_task(self._extend(deadline))
        try:
            yield
        finally:
            heartbeat.cancel()
            # Waits for the end, whatever it is: no extension may follow the acknowledgement.
            await asyncio.wait([heartbeat])

    async def _extend(self, deadline: asyncio.Timeout | None) -> None:
        """Move the deadline, if any, with every confirmed extension; end the body at once if the lease is lost."""
        loop = asyncio.get_running_loop()

        def move(when: float) -> None:
            if deadline is not None and not deadline.expired():  # one that has just expired cannot be moved
                deadline.reschedule(when)

        while True:
            # Counted from the request and not from its answer: the server's own clock starts somewhere in between.
            asked = loop.time()
            try:
                await self.delivery.extend()
                move(asked + self.ack_wait_s)
            except LeaseLost:
                move(asked)
                return
            except BrokerError as error:
                # The broker may come back in time. If it does not, the deadline ends the body.
                log.warning("lease_not_extended", ticket=self.ticket.ticket_id, error=str(error))
            # A third, so that two extensions in a row may fail before the lease is lost.
            await asyncio.sleep(max(0.0, asked + self.ack_wait_s / 3 - loop.time()))

    async def acknowledge(self) -> None:
        await self.delivery.acknowledge()

    async def give_back(self, delay_s: float = 0.0) -> None:
        await self.delivery.give_back(delay_s)


class TicketQueue:
    def __init__(self, transport: Transport, signer: TicketSigner | None = None) -> None:
        self._transport = transport
        self._signer = signer or TicketSigner(transport.run)
        self._issued: dict[Kind, int] = {}
        """By kind, how many tickets are known to have been issued."""
        self._purged: dict[Kind, int] = {}
        """By kind, the number below which tickets have been removed."""

    async def issue(self, ticket: Ticket) -> bool:
        """Publish a ticket; return False if it had been issued before."""
        # Under the ticket's own id: if a controller that restarts repeats this, the server keeps one copy.
        data = encode(self._signer.sign(ticket))
        stored = await self._transport.publish(_subject(ticket.kind), data, message_id=ticket.ticket_id)
        return not stored.duplicate

    async def reissue(self, ticket: Ticket, earlier: int) -> None:
        """Publish a lost ticket again, under its own id; `earlier` is the sequence of its newest copy, or 0."""
        # A message id of its own: the server remembers the ticket's first one for an hour, and would store nothing.
        data = encode(self._signer.sign(ticket))
        await self._transport.publish(REISSUED, data, message_id=f"{ticket.ticket_id}.again-{earlier}")

    async def stored_tickets(self) -> dict[str, tuple[int, Ticket]]:
        """Return, by ticket id, the newest copy of each ticket in the stream with its sequence."""
        return {ticket.ticket_id: (sequence, ticket) for sequence, ticket in await self._scan("tickets.>")}

    async def count_issued(self, kind: Kind) -> int:
        """Return how many tickets of a kind were issued: the number of the next one.

        The last message has the highest number. The first call reads all of them, in case an older ticket was stored a
        second time.
        """
        if kind not in self._issued:
            # Once per process and kind: a scan reads every standing ticket.
            stored = await self._scan(_subject(kind))
            self._issued[kind] = max((ticket.number for _, ticket in stored), default=-1) + 1
        if (ticket := await self.last_issued(kind)) is not None:
            self._issued[kind] = max(self._issued[kind], ticket.number + 1)
        return self._issued[kind]

    async def last_issued(self, kind: Kind) -> Ticket | None:
        """Return the newest ticket of a kind; None if there is none, or if the last message is no ticket."""
        message = await self._transport.last(Stream.TICKETS, _subject(kind))
        if message is not None:
            with suppress(RecordError):
                return decode(message.data, Ticket)
        return None

    async def was_issued(self, kind: Kind, number: int) -> bool:
        """Return whether a ticket was issued; ask the broker only for a number above those known to be issued."""
        # A signature that was verified proves it already (`LogReader` has done so).
        return self._signer.signs or number < self._issued.get(kind, 0) or number < await self.count_issued(kind)

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
                await store_dead_letter(self._transport, Stream.TICKETS, delivery.message, str(error))
                await delivery.acknowledge()
                continue
            return Lease(ticket, delivery.deliveries, delivery, self._transport.ack_wait_s)
        return None

    async def purge_below(self, lowest_unsettled: Mapping[Kind, int]) -> None:
        """Remove the tickets of each kind below its number, but never the last one: `count_issued` reads it."""
        for kind, number in lowest_unsettled.items():
            keep = min(number, await self.count_issued(kind) - 1)
            # Without something new to free, the scan would be for nothing.
            if keep > self._purged.get(kind, 0):
                await self._purge(_subject(kind), {kind: keep})
                self._purged[kind] = keep
        # Here the last one may go too: nothing is counted by this subject.
        await self._purge(REISSUED, lowest_unsettled)

    async def _purge(self, subject: str, keep: Mapping[Kind, int]) -> None:
        """Remove the tickets of a subject before the first one that is to be kept."""
        if tickets := await self._scan(subject):
            wanted = (sequence for sequence, ticket in tickets if ticket.number >= keep.get(ticket.kind, 0))
            await self._transport.purge(Stream.TICKETS, next(wanted, tickets[-1][0] + 1), subject)

    async def _scan(self, subject: str) -> list[tuple[int, Ticket]]:
        """Return all tickets of a subject with their sequences, in the order of issue."""
        while True:
            with suppress(LogGap):  # a purge has overtaken the scan: begin again with what is left
                return await self._scan_once(subject)

    async def _scan_once(self, subject: str) -> list[tuple[int, Ticket]]:
        # From what is left: a reader that begins at 0 would report the purged tickets as a gap.
        before = (await self._transport.extent(Stream.TICKETS)).first_sequence - 1
        found: list[tuple[int, Ticket]] = []
        async with aclosing(scan(self._transport, Stream.TICKETS, before, subject, SCAN_BATCH)) as messages:
            async for message in messages:
                # Whoever leases it moves it to DEAD. To a scan it is no ticket.
                with suppress(RecordError):
                    found.append((message.sequence, decode(message.data, Ticket)))
        return found


def _subject(kind: Kind) -> str:
    return f"tickets.{kind.value}"
