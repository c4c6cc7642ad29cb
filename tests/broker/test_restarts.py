"""A nats-server that is killed loses nothing that it acknowledged, and nobody above the transport notices."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from horizonrl.broker.api import Key, Stream
from horizonrl.broker.groups import GroupLog
from horizonrl.broker.nats.connect import connect
from horizonrl.broker.nats.reader import NatsReader
from horizonrl.broker.nats.server import EmbeddedServer
from horizonrl.broker.nats.transport import NatsTransport
from horizonrl.broker.tickets import TicketQueue
from horizonrl.broker.weights.frames import digest_file, fetch_frame, publish_frame
from horizonrl.common.config.schema import BrokerSection
from horizonrl.common.errors import BrokerUnreachable
from horizonrl.common.types import Group, PolicyVersion
from tests.records import make_group, make_ticket

pytestmark = pytest.mark.process

GROUPS = 300
KILLS = 2


@asynccontextmanager
async def opened(server: EmbeddedServer, ack_wait_s: float = 30.0) -> AsyncIterator[NatsTransport]:
    transport = await connect("r", BrokerSection(url=server.url, ack_wait_s=ack_wait_s))
    try:
        yield transport
    finally:
        await transport.close()


async def crash(server: EmbeddedServer, down_s: float = 0.2) -> None:
    await server.kill()
    await asyncio.sleep(down_s)
    await server.start()


async def test_a_log_that_is_written_and_read_through_kills_has_every_group_once(
    tmp_path: Path,
) -> None:
    async with (
        EmbeddedServer(tmp_path) as server,
        opened(server) as actor,
        opened(server) as learner,
    ):
        published = asyncio.Event()

        async def publish(worker: int) -> None:
            for number in range(worker, GROUPS, 4):
                await GroupLog(actor).publish(make_group(number))
                if number > GROUPS // 6:
                    published.set()

        async def read() -> list[int]:
            reader = await GroupLog(learner).read(after=0)
            numbers: list[int] = []
            while len(numbers) < GROUPS:
                entry = await reader.next(60.0)
                assert entry is not None
                assert isinstance(entry.record, Group)
                numbers.append(entry.record.ticket.number)
            await reader.close()
            return numbers

        async with asyncio.timeout(90.0), asyncio.TaskGroup() as group:
            reading = group.create_task(read())
            for worker in range(4):
                group.create_task(publish(worker))
            await published.wait()
            for _ in range(KILLS):
                await crash(server)
        assert sorted(reading.result()) == list(range(GROUPS))
        assert (await learner.extent(Stream.GROUPS)).messages == GROUPS
        assert actor.counters.reconnects >= 1


async def test_leases_watches_and_waiting_readers_continue_after_a_kill(tmp_path: Path) -> None:
    async with (
        EmbeddedServer(tmp_path) as server,
        opened(server, 2.0) as transport,
        asyncio.timeout(60.0),
    ):
        queue = TicketQueue(transport)
        await queue.issue(make_ticket(0))
        held = await queue.lease(5.0)
        assert held is not None
        await transport.put(Key.POLICY, b"before")
        watch = transport.watch(Key.POLICY)
        assert await anext(watch) == b"before"
        reader = await GroupLog(transport).read(after=0)
        async with asyncio.TaskGroup() as group:
            entry = group.create_task(reader.next(30.0))
            value = group.create_task(anext(watch))  # type: ignore[arg-type]
            await asyncio.sleep(0.1)
            await crash(server)
            await held.acknowledge()
            await transport.put(Key.POLICY, b"after")
            await GroupLog(transport).publish(make_group(0))
        assert value.result() == b"after"
        assert entry.result() is not None
        await queue.issue(make_ticket(1))
        lease = await queue.lease(10.0)
        assert lease is not None
        assert lease.ticket.number == 1
        await lease.acknowledge()
        assert await queue.lease(2.5) is None


async def test_a_frame_is_published_and_fetched_through_a_kill(tmp_path: Path) -> None:
    file = tmp_path / "frame"
    file.write_bytes(os.urandom(1 << 20) * 24)
    digest = await asyncio.to_thread(digest_file, file)
    async with (
        EmbeddedServer(tmp_path / "nats") as server,
        opened(server) as transport,
        asyncio.timeout(60.0),
    ):
        async with asyncio.TaskGroup() as group:
            publishing = group.create_task(
                publish_frame(transport, file, PolicyVersion(version=1), digest)
            )
            await asyncio.sleep(0.02)
            await crash(server)
        async with asyncio.TaskGroup() as group:
            fetching = group.create_task(
                fetch_frame(transport, publishing.result(), tmp_path / "fetched")
            )
            await asyncio.sleep(0.01)
            await crash(server)
        assert digest_file(fetching.result()) == digest


async def test_a_call_with_a_deadline_reports_a_broker_that_stays_away(tmp_path: Path) -> None:
    async with EmbeddedServer(tmp_path) as server, opened(server, 0.6) as transport:
        await TicketQueue(transport).issue(make_ticket(0))
        lease = await TicketQueue(transport).lease(5.0)
        assert lease is not None
        await server.kill()
        async with asyncio.timeout(10.0):
            with pytest.raises(BrokerUnreachable, match="has not answered"):
                await lease.delivery.extend()
            assert await TicketQueue(transport).lease(0.2) is None
        assert not transport.connected


def test_a_reader_whose_time_runs_out_within_a_batch_gives_all_of_it_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with EmbeddedServer(tmp_path) as server, opened(server) as transport:
            for number in range(3):
                await transport.publish("groups.other", b"", message_id=f"other-{number}")
                await transport.publish("groups.wanted", b"", message_id=f"wanted-{number}")
            reader = await transport.reader(Stream.GROUPS, 0, "groups.wanted")
            looked = NatsReader._check_gap
            waiting = 0

            async def slow(self: NatsReader, wanted: int) -> None:
                nonlocal waiting
                waiting += 1
                if waiting == 2:  # within the batch, all of which has come
                    await asyncio.sleep(60)
                await looked(self, wanted)

            monkeypatch.setattr(NatsReader, "_check_gap", slow)
            assert await reader.fetch(3, timeout_s=1.0) == []
            read = [message.sequence for message in await reader.fetch(3, timeout_s=10.0)]
            assert read == [2, 4, 6]
            await reader.close()

    asyncio.run(scenario())
