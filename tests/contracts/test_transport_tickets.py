"""What every transport keeps to (broker/api.py): the ticket queue and its leases."""

import asyncio

from horizonrl.broker.api import QueueState
from tests.brokers import Broker, fill


async def test_a_lease_is_exclusive_until_it_runs_out(broker: Broker) -> None:
    async with broker.open(ack_wait_s=0.5) as actor, broker.open(ack_wait_s=0.5) as rival:
        await actor.publish("tickets.train", b"t", message_id="t-0")
        held = await actor.lease(5.0)
        assert held is not None
        assert (held.message.data, held.message.message_id, held.deliveries) == (b"t", "t-0", 1)
        assert await rival.lease(0.2) is None
        again = await rival.lease(5.0)
        assert again is not None
        assert again.deliveries == 2
        assert rival.counters.redelivered == 1
        await again.acknowledge()
        assert await actor.lease(0.7) is None


async def test_an_extended_lease_outlives_its_ack_wait(broker: Broker) -> None:
    async with broker.open(ack_wait_s=0.4) as actor, broker.open(ack_wait_s=0.4) as rival:
        await actor.publish("tickets.train", b"t")
        held = await actor.lease(5.0)
        assert held is not None
        async with asyncio.TaskGroup() as group:
            other = group.create_task(rival.lease(1.0))
            for _ in range(10):
                await held.extend()
                await asyncio.sleep(0.1)
            await held.acknowledge()
        assert other.result() is None


async def test_a_ticket_given_back_comes_again_after_its_delay(broker: Broker) -> None:
    async with broker.open() as transport:
        await transport.publish("tickets.train", b"t")
        first = await transport.lease(5.0)
        assert first is not None
        await first.give_back(0.3)
        assert await transport.lease(0.1) is None
        second = await transport.lease(5.0)
        assert second is not None
        await second.give_back()
        third = await transport.lease(5.0)
        assert third is not None
        assert third.deliveries == 3


async def test_concurrent_leases_of_one_actor_get_different_tickets(broker: Broker) -> None:
    async with broker.open() as transport:
        async with asyncio.TaskGroup() as group:
            leases = [group.create_task(transport.lease(5.0)) for _ in range(4)]
            await asyncio.sleep(0.05)
            await fill(transport, 4, "tickets.train")
        got = sorted(
            delivery.message.data for task in leases if (delivery := task.result()) is not None
        )
        assert got == [b"0", b"1", b"2", b"3"]
        queue = await transport.queue()
        assert (queue.waiting, queue.leased) == (0, 4)


async def test_the_queue_counts_tickets_that_wait_and_tickets_that_are_leased(
    broker: Broker,
) -> None:
    async with broker.open() as transport:
        await fill(transport, 3, "tickets.train")
        # A server counts what it has stored a moment after it has confirmed it.
        async with asyncio.timeout(5.0):
            while await transport.queue() != QueueState(waiting=3, leased=0, floor=0):
                await asyncio.sleep(0.01)
        delivery = await transport.lease(5.0)
        assert delivery is not None
        assert await transport.queue() == QueueState(waiting=2, leased=1, floor=0)
        await delivery.acknowledge()
        assert await transport.queue() == QueueState(waiting=2, leased=0, floor=1)


async def test_the_queue_counts_who_waits_for_a_ticket(broker: Broker) -> None:
    async with broker.open() as transport, broker.open() as other:
        waiting = [asyncio.create_task(each.lease(30.0)) for each in (transport, other)]
        async with asyncio.timeout(30.0):
            while (await transport.queue()).idle != 2:
                await asyncio.sleep(0.05)
        await fill(transport, 2, "tickets.train")
        assert all([await task for task in waiting])
        assert (await transport.queue()).idle == 0


async def test_the_queues_floor_waits_for_the_earliest_lease(broker: Broker) -> None:
    async with broker.open() as transport:
        await fill(transport, 4, "tickets.train")
        held = [await transport.lease(5.0) for _ in range(3)]
        first, second, third = (delivery for delivery in held if delivery is not None)
        await second.acknowledge()
        assert (await transport.queue()).floor == 0
        await first.acknowledge()
        assert (await transport.queue()).floor == 2
        await third.give_back(delay_s=60.0)
        assert await transport.queue() == QueueState(waiting=1, leased=1, floor=2)
