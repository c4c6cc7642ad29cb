"""What every transport keeps to (broker/api.py): the keys of the run's state."""

import asyncio
import time

import pytest

from horizonrl.broker.api import Key
from horizonrl.common.errors import StateConflict
from tests.brokers import Broker


async def test_a_key_tells_when_it_was_last_set(broker: Broker) -> None:
    async with broker.open() as transport:
        assert await transport.set_at(Key.PROGRESS) is None
        await transport.put(Key.PROGRESS, b"1")
        told = await transport.set_at(Key.PROGRESS)
        assert told is not None
        assert abs(told - time.time()) < 5.0


async def test_a_key_holds_its_last_value(broker: Broker) -> None:
    async with broker.open() as transport:
        assert await transport.get(Key.POLICY) is None
        first = await transport.put(Key.POLICY, b"1")
        second = await transport.put(Key.POLICY, b"2")
        await transport.put(Key.HORIZON, b"h")
        assert second > first
        assert await transport.get(Key.POLICY) == b"2"


async def test_a_key_set_after_a_revision_tells_when_somebody_else_came_first(
    broker: Broker,
) -> None:
    async with broker.open() as transport:
        assert await transport.revision(Key.PROGRESS) == 0
        first = await transport.put(Key.PROGRESS, b"mine", 0)
        with pytest.raises(StateConflict, match="since revision 0"):
            await transport.put(Key.PROGRESS, b"the first", 0)
        assert await transport.revision(Key.PROGRESS) == first
        second = await transport.put(Key.PROGRESS, b"mine too", first)
        await transport.put(Key.POLICY, b"another key")
        third = await transport.put(Key.PROGRESS, b"once more", second)
        theirs = await transport.put(Key.PROGRESS, b"theirs")
        with pytest.raises(StateConflict, match=f"since revision {third}"):
            await transport.put(Key.PROGRESS, b"mine again", third)
        assert await transport.get(Key.PROGRESS) == b"theirs"
        assert await transport.put(Key.PROGRESS, b"taken over", theirs) > theirs


async def test_a_watch_yields_the_present_value_and_then_the_later_ones(broker: Broker) -> None:
    async with broker.open() as writer, broker.open() as reader, asyncio.timeout(10.0):
        await writer.put(Key.PROGRESS, b"present")
        watch = reader.watch(Key.PROGRESS)
        assert await anext(watch) == b"present"
        async with asyncio.TaskGroup() as group:
            later = group.create_task(anext(watch))  # type: ignore[arg-type]
            await asyncio.sleep(0.05)
            await writer.put(Key.HORIZON, b"another key")
            await writer.put(Key.PROGRESS, b"later")
        assert later.result() == b"later"


async def test_a_watch_of_an_empty_key_waits_for_the_first_value(broker: Broker) -> None:
    async with broker.open() as transport, asyncio.timeout(10.0):
        watch = transport.watch(Key.POLICY)
        async with asyncio.TaskGroup() as group:
            first = group.create_task(anext(watch))  # type: ignore[arg-type]
            await asyncio.sleep(0.05)
            await transport.put(Key.POLICY, b"v0")
        assert first.result() == b"v0"
