"""What is stored is read to its end, whatever the broker does meanwhile."""

import asyncio
from contextlib import aclosing

import pytest

from horizonrl.broker.api import Stream, Transport
from horizonrl.broker.memory import MemoryServer
from horizonrl.broker.scan import SILENCE_S, scan
from horizonrl.common.errors import BrokerUnreachable
from tests.broker.silence import SilentTransport
from tests.brokers import Broker


async def read(transport: Transport, after: int, subject: str, batch: int = 2) -> list[int]:
    async with aclosing(scan(transport, Stream.TICKETS, after, subject, batch)) as messages:
        return [message.sequence async for message in messages]


async def test_what_is_stored_is_read_to_its_end_and_no_further(broker: Broker) -> None:
    async with broker.open() as transport, asyncio.timeout(SILENCE_S / 2):
        for number in range(7):
            await transport.publish(
                "tickets.eval" if number % 2 else "tickets.train", b"x", message_id=str(number)
            )
        assert await read(transport, 0, "tickets.>") == [1, 2, 3, 4, 5, 6, 7]
        assert await read(transport, 2, "tickets.train", batch=1) == [3, 5, 7]
        assert await read(transport, 7, "tickets.train") == []
        assert await read(transport, 0, "tickets.demo") == []


@pytest.mark.parametrize("delivered", [0, 3])
async def test_silence_is_a_broker_in_trouble_and_not_the_end(delivered: int) -> None:
    transport = SilentTransport(MemoryServer(), delivered)
    for _ in range(5):
        await transport.publish("tickets.train", b"x")
    with pytest.raises(
        BrokerUnreachable, match=f"up to 5, but delivered nothing after {delivered}"
    ):
        await read(transport, 0, "tickets.train")
    assert transport.readers == 0


async def test_what_is_purged_while_it_is_read_is_not_waited_for(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("horizonrl.broker.scan.SILENCE_S", 0.5)

    async with broker.open() as transport:
        for number in range(4):
            await transport.publish("tickets.again" if number > 1 else "tickets.train", b"x")
        found: list[int] = []
        async with aclosing(scan(transport, Stream.TICKETS, 0, "tickets.>", batch=1)) as messages:
            async for message in messages:
                found.append(message.sequence)
                await transport.purge(Stream.TICKETS, 9, "tickets.again")
        assert found == [1, 2]


async def test_a_reading_that_is_broken_off_closes_its_reader() -> None:
    transport = SilentTransport(MemoryServer(), delivered=5)
    for _ in range(5):
        await transport.publish("tickets.train", b"x")
    async with aclosing(scan(transport, Stream.TICKETS, 0, "tickets.train")) as messages:
        async for _ in messages:
            break
    assert transport.readers == 0
