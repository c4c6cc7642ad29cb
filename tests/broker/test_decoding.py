"""Groups are decoded in order, large ones in threads beside a free event loop, and none is lost to a cancellation."""

import asyncio
import threading

import pytest

from horizonrl.broker import groups
from horizonrl.broker.groups import DeadLetter, GroupLog
from horizonrl.broker.memory import MemoryServer, MemoryTransport
from horizonrl.common.types import Group, Void
from tests.records import make_group, make_ticket


async def filled(count: int) -> MemoryTransport:
    transport = MemoryTransport(MemoryServer(), "run")
    for number in range(count):
        if number % 5 == 3:
            await transport.publish("groups.train", b"junk", message_id=f"train-{number:08d}")
        elif number % 5 == 4:
            await GroupLog(transport).publish_void(
                Void(ticket=make_ticket(number), reason="broken", actor="a")
            )
        else:
            await GroupLog(transport).publish(make_group(number))
    return transport


async def sequences(reader: groups.LogReader, count: int) -> list[tuple[int, str]]:
    entries = [await reader.next(1.0) for _ in range(count)]
    return [(entry.sequence, type(entry.record).__name__) for entry in entries if entry is not None]


def kind(number: int) -> str:
    return {3: DeadLetter, 4: Void}.get(number % 5, Group).__name__


EXPECTED = [(number + 1, kind(number)) for number in range(30)]


@pytest.mark.parametrize("large_bytes", [0, groups.LARGE_BYTES])
async def test_entries_come_in_the_order_of_the_log_whatever_they_hold(
    monkeypatch: pytest.MonkeyPatch, large_bytes: int
) -> None:
    used: set[str] = set()

    def noted(*arguments):  # type: ignore[no-untyped-def]
        used.add(threading.current_thread().name)
        return decode(*arguments)

    decode = groups.decode
    monkeypatch.setattr(groups, "decode", noted)
    monkeypatch.setattr(groups, "LARGE_BYTES", large_bytes)

    assert await sequences(await GroupLog(await filled(30)).read(after=0), 30) == EXPECTED
    assert (threading.main_thread().name in used) is (large_bytes > 0)


@pytest.mark.parametrize("large_bytes", [0, groups.LARGE_BYTES])
@pytest.mark.parametrize("waits", range(6))
async def test_a_call_that_is_cancelled_while_its_entry_is_decoded_loses_none(
    monkeypatch: pytest.MonkeyPatch, waits: int, large_bytes: int
) -> None:
    monkeypatch.setattr(groups, "LARGE_BYTES", large_bytes)

    reader = await GroupLog(await filled(30)).read(after=0)
    found: list[tuple[int, str]] = []
    while len(found) < 30:
        call = asyncio.create_task(reader.next(1.0))
        for _ in range(waits):
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call])
        if not call.cancelled() and (entry := call.result()) is not None:
            found.append((entry.sequence, type(entry.record).__name__))
        found += await sequences(reader, 1)
    assert found == EXPECTED
