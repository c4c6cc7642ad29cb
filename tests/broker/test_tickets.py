import asyncio

import pytest

from horizonrl.broker.api import Message, Stream, Transport
from horizonrl.broker.codec import encode
from horizonrl.broker.leases import Lease
from horizonrl.broker.memory import MemoryReader, MemoryServer, MemoryTransport
from horizonrl.broker.open_tickets import OpenTickets
from horizonrl.broker.tickets import LATEST, REISSUED, TicketQueue
from horizonrl.common.errors import BrokerUnreachable, LeaseLost
from horizonrl.common.state import Progress
from horizonrl.common.types import Kind
from tests.broker.silence import SilentTransport
from tests.brokers import Broker
from tests.records import make_ticket


async def numbers(transport: Transport) -> list[tuple[str, int]]:
    """Return subject and sequence of every ticket message in the stream."""
    extent = await transport.extent(Stream.TICKETS)
    if not extent.messages:
        return []
    reader = await transport.reader(Stream.TICKETS, extent.first_sequence - 1)
    found = [(message.subject, message.sequence) for message in await reader.fetch(1_000, 5.0)]
    await reader.close()
    return found


async def test_a_ticket_is_issued_once(broker: Broker) -> None:
    async with broker.open() as transport:
        queue = TicketQueue(transport)
        assert not (await queue.issue(make_ticket(0))).duplicate
        assert (await queue.issue(make_ticket(0))).duplicate
        assert not (await queue.issue(make_ticket(0, Kind.EVAL))).duplicate


async def test_how_many_were_issued_is_read_from_the_stream(broker: Broker) -> None:
    async with broker.open() as transport:
        assert await TicketQueue(transport).count_issued(Kind.TRAIN) == 0
        for number in range(3):
            await TicketQueue(transport).issue(make_ticket(number))
        await TicketQueue(transport).issue(make_ticket(0, Kind.DEMO))
        assert await TicketQueue(transport).count_issued(Kind.TRAIN) == 3
        assert await TicketQueue(transport).count_issued(Kind.DEMO) == 1


async def test_a_foreign_message_at_the_end_does_not_hide_what_was_issued(broker: Broker) -> None:
    async with broker.open() as transport:
        await transport.publish("tickets.eval", b"junk")
        assert await TicketQueue(transport).count_issued(Kind.EVAL) == 0
        await TicketQueue(transport).issue(make_ticket(6))
        await transport.publish("tickets.train", b"junk")
        assert await TicketQueue(transport).count_issued(Kind.TRAIN) == 7


async def test_an_old_ticket_that_is_stored_again_does_not_take_the_count_back(
    broker: Broker,
) -> None:
    async with broker.open() as transport:
        queue = TicketQueue(transport)
        for number in range(3):
            await queue.issue(make_ticket(number))
        await transport.publish("tickets.train", encode(make_ticket(0)), message_id="repeat")
        assert await queue.count_issued(Kind.TRAIN) == 3
        assert await TicketQueue(transport).count_issued(Kind.TRAIN) == 3


async def test_tickets_that_are_stored_out_of_order_are_counted_by_whoever_had_counted_before() -> (
    None
):
    transport = MemoryTransport()
    issuer, reader = TicketQueue(transport), TicketQueue(transport)
    await issuer.issue(make_ticket(0))
    assert await reader.count_issued(Kind.TRAIN) == 1
    for number in (2, 1, 5, 4, 3):
        await issuer.issue(make_ticket(number))
    assert await reader.was_issued(Kind.TRAIN, 5)
    assert not await reader.was_issued(Kind.TRAIN, 6)
    for number in (7, 6):
        await issuer.issue(make_ticket(number))
    assert await reader.count_issued(Kind.TRAIN) == 8


async def test_a_vanished_ticket_is_issued_again_under_its_own_id(broker: Broker) -> None:
    async with broker.open() as transport:
        queue = TicketQueue(transport)
        for number in range(2):
            await queue.issue(make_ticket(number))
        for _ in range(2):
            lease = await queue.lease(5.0)
            assert lease is not None
            await lease.acknowledge()
        (message, ticket), _ = await queue.stored_tickets()
        sequence = message.sequence
        for _ in range(2):  # the second time is a repeat of the first
            stored, subject = await queue.reissue(ticket, sequence)
            assert (stored.sequence, subject) == (sequence + 2, REISSUED)
        assert [ticket.number for _, ticket in await queue.stored_tickets()] == [0, 1, 0]
        assert await queue.count_issued(Kind.TRAIN) == 2
        again = await queue.lease(5.0)
        assert again is not None and again.ticket == ticket
        assert await queue.lease(0.1) is None
        still_open = OpenTickets(transport, queue)
        await still_open.refresh(Progress(), {Kind.TRAIN: 2})
        await still_open.purge(Progress(lowest_unsettled={Kind.TRAIN: 1}))
        assert [ticket.number for _, ticket in await queue.stored_tickets()] == [1]


async def test_a_leased_ticket_is_the_one_issued_and_ends_when_acknowledged(broker: Broker) -> None:
    async with broker.open(ack_wait_s=0.4) as transport:
        queue = TicketQueue(transport)
        await queue.issue(make_ticket(4))
        lease = await queue.lease(5.0)
        assert lease is not None
        assert (lease.ticket, lease.deliveries) == (make_ticket(4), 1)
        await lease.acknowledge()
        assert await queue.lease(0.6) is None


async def test_a_lease_is_extended_for_as_long_as_the_work_takes(broker: Broker) -> None:
    async with broker.open(ack_wait_s=0.5) as transport, broker.open(ack_wait_s=0.5) as rival:
        await TicketQueue(transport).issue(make_ticket())
        lease = await TicketQueue(transport).lease(5.0)
        assert lease is not None
        async with lease.held():
            assert await TicketQueue(rival).lease(1.2) is None
            await lease.acknowledge()
        assert await TicketQueue(rival).lease(0.6) is None


async def test_an_undecodable_ticket_is_moved_to_dead_and_the_next_one_is_leased(
    broker: Broker,
) -> None:
    async with broker.open(ack_wait_s=0.4) as transport:
        await transport.publish("tickets.train", b"junk")
        await TicketQueue(transport).issue(make_ticket(1))
        lease = await TicketQueue(transport).lease(5.0)
        assert lease is not None
        assert lease.ticket.number == 1
        dead = await transport.last(Stream.DEAD, "dead.tickets")
        assert dead is not None
        assert dead.data == b"junk"
        assert dead.headers["Horizon-Subject"] == "tickets.train"
        assert dead.headers["Horizon-Sequence"] == "1"
        assert "MessagePack" in dead.headers["Horizon-Reason"]
        assert transport.counters.dead_letters == 1
        await lease.acknowledge()
        assert await transport.lease(0.6) is None


async def test_settled_tickets_are_purged_per_kind_but_the_last_one_stays(broker: Broker) -> None:
    async with broker.open() as transport:
        queue = TicketQueue(transport)
        for number in range(4):
            await queue.issue(make_ticket(number))
            await queue.issue(make_ticket(number, Kind.EVAL))
        still_open = OpenTickets(transport, queue)
        # Before it knows what there is.
        await still_open.purge(Progress(lowest_unsettled={Kind.TRAIN: 4}))
        await still_open.refresh(Progress(), {})
        await still_open.purge(Progress(lowest_unsettled={Kind.TRAIN: 2}))
        assert await numbers(transport) == [
            ("tickets.eval", 2),
            ("tickets.eval", 4),
            ("tickets.train", 5),
            ("tickets.eval", 6),
            ("tickets.train", 7),
            ("tickets.eval", 8),
        ]
        await still_open.purge(Progress(lowest_unsettled={Kind.TRAIN: 4, Kind.EVAL: 3}))
        assert await numbers(transport) == [("tickets.train", 7), ("tickets.eval", 8)]
        assert await queue.count_issued(Kind.TRAIN) == 4
        assert (await queue.issue(make_ticket(0))).duplicate, (
            "a purged ticket cannot be issued again"
        )


def held_lease(ack_wait_s: float, delivery: object) -> Lease:
    return Lease(make_ticket(), 1, delivery, ack_wait_s)  # type: ignore[arg-type]


class Unreachable:
    """A delivery whose server has gone away."""

    deliveries = 1
    message = Message("tickets.train", b"", 1)

    async def extend(self) -> None:
        raise BrokerUnreachable("no answer")


async def test_work_is_cancelled_when_no_extension_is_confirmed_for_ack_wait() -> None:
    loop = asyncio.get_running_loop()
    started = loop.time()
    with pytest.raises(LeaseLost, match="train-00000000"):
        async with held_lease(0.3, Unreachable()).held():
            await asyncio.sleep(30)
    assert 0.25 < loop.time() - started < 5


async def test_a_delivery_is_not_cancelled_however_long_no_extension_is_confirmed() -> None:
    async with held_lease(0.05, Unreachable()).kept():
        await asyncio.sleep(0.2)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_work_is_cancelled_when_the_ticket_has_gone_to_another_actor() -> None:
    server = MemoryServer(ack_wait_s=0.1)
    actor, rival = TicketQueue(MemoryTransport(server)), TicketQueue(MemoryTransport(server))
    await actor.issue(make_ticket())
    lost = await actor.lease(1.0)
    taken = await rival.lease(1.0)
    assert lost is not None
    assert taken is not None
    async with taken.held():
        with pytest.raises(LeaseLost):
            async with lost.held():
                await asyncio.sleep(30)


async def test_an_error_of_the_work_passes_through_and_a_timeout_of_its_own_stays_a_timeout() -> (
    None
):
    transport = MemoryTransport()
    await TicketQueue(transport).issue(make_ticket())
    lease = await TicketQueue(transport).lease(1.0)
    assert lease is not None
    with pytest.raises(ZeroDivisionError):
        async with lease.held():
            raise ZeroDivisionError
    with pytest.raises(TimeoutError):
        async with lease.held():
            raise TimeoutError
    async with asyncio.timeout(5.0):
        with pytest.raises(TimeoutError):
            async with lease.held(), asyncio.timeout(0.01):
                await asyncio.sleep(30)


async def test_cancelling_the_work_ends_the_heartbeat() -> None:
    transport = MemoryTransport()
    await TicketQueue(transport).issue(make_ticket())
    lease = await TicketQueue(transport).lease(1.0)
    assert lease is not None

    async def work() -> None:
        async with lease.held():
            await asyncio.sleep(30)

    task = asyncio.create_task(work())
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_lease_may_be_held_for_an_instant(broker: Broker) -> None:
    async with broker.open() as transport, asyncio.timeout(60):
        queue = TicketQueue(transport)
        await queue.issue(make_ticket(0))
        lease = await queue.lease(5.0)
        assert lease is not None
        for rest in range(300):  # the first extension is on its way when the work is done
            async with lease.held():
                await asyncio.sleep(rest * 1e-5)


async def test_the_tickets_of_a_kind_are_counted_however_many_of_another_follow_them() -> None:
    server = MemoryServer()
    queue = TicketQueue(MemoryTransport(server))
    # Issued together and stored in another order: the last message has not the highest number.
    for number in (0, 1, 4, 3):
        await queue.issue(make_ticket(number, Kind.DEMO))
    await queue.issue_all([make_ticket(number) for number in range(LATEST + 10)])
    after_restart = TicketQueue(MemoryTransport(server))
    assert await after_restart.count_issued(Kind.DEMO) == 5
    assert after_restart.missing(Kind.DEMO) == [2]
    assert await after_restart.count_issued(Kind.TRAIN) == LATEST + 10


class Purging(MemoryTransport):
    """A transport on which somebody purges the oldest ticket just before the first reading of the queue."""

    purged = False

    async def reader(self, stream: Stream, after: int, subject: str | None = None) -> MemoryReader:
        reader = await super().reader(stream, after, subject)
        if not self.purged:
            self.purged = True
            await self.purge(stream, below=2)
        return reader


async def test_a_queue_that_is_purged_while_it_is_read_is_read_again() -> None:
    transport = Purging(MemoryServer(), "run")
    queue = TicketQueue(transport)
    for number in range(3):
        await queue.issue(make_ticket(number))
    assert [ticket.number for _, ticket in await queue.stored_tickets()] == [1, 2]
    assert transport.purged


async def test_a_queue_that_falls_silent_is_not_taken_for_a_shorter_one() -> None:
    server = MemoryServer()
    for number in range(3):
        await TicketQueue(MemoryTransport(server)).issue(make_ticket(number))
    with pytest.raises(BrokerUnreachable, match=r"TICKETS holds .* up to 3"):
        await TicketQueue(SilentTransport(server, delivered=2)).stored_tickets()
