"""A lease: an actor's hold on a ticket, extended while its group is played, and ended once.

Place in the flow: Ticket → **Lease** → Episode. If a lease is not extended, another actor gets the ticket.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from horizonrl.broker.api import Delivery
from horizonrl.common.errors import BrokerError, BrokerUnreachable, LeaseLost
from horizonrl.common.logs import get_logger
from horizonrl.common.types import Ticket

log = get_logger()


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
            # One that has just expired cannot be moved.
            if deadline is not None and not deadline.expired():
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

    async def acknowledge(self) -> bool:
        """End the lease for good; return whether the broker has confirmed it within `ack_wait_s`.

        It does not answer for a ticket that it has lost. An acknowledgement saves a repeat, which would be recognised,
        so it is not worth a longer wait.
        """
        return await acknowledge(self.delivery)

    async def give_back(self, delay_s: float = 0.0) -> None:
        await self.delivery.give_back(delay_s)


async def acknowledge(delivery: Delivery) -> bool:
    """End a delivery for good; return whether the broker has confirmed it."""
    try:
        await delivery.acknowledge()
    except BrokerUnreachable as error:
        log.warning("ack_unconfirmed", sequence=delivery.message.sequence, error=str(error))
        return False
    return True
