"""What an actor can do to the others with what it may publish, on a real nats-server."""

import asyncio
import ssl
from pathlib import Path

import nats
import pytest
from nats.aio.client import Client

from horizonrl.broker.access import Role, inbox
from horizonrl.broker.api import Key, Stream, Transport
from horizonrl.broker.state import StateStore
from horizonrl.broker.tickets import TicketQueue
from horizonrl.common.types import Progress
from tests.broker.secured import RUN, Secured, secured
from tests.records import make_ticket

pytestmark = pytest.mark.process

STATUSES = ("408", "100", "503", "500", "abc")


async def actor_client(broker: Secured) -> Client:
    context = ssl.create_default_context(cafile=broker.keys.authority)
    return await nats.connect(
        broker.server.url,
        nkeys_seed=str(broker.keys.seed(RUN, Role.ACTOR)),
        tls=context,
        allow_reconnect=False,
        inbox_prefix=inbox(RUN, Role.ACTOR),
    )


async def read(transport: Transport, count: int) -> list[tuple[int, bytes]]:
    reader = await transport.reader(Stream.GROUPS, 0)
    found: list[tuple[int, bytes]] = []
    async with asyncio.timeout(60.0):
        while len(found) < count:
            found += [(message.sequence, message.data) for message in await reader.fetch(8, 30.0)]
    await reader.close()
    return found


def test_a_header_that_looks_like_a_word_of_the_server_hides_no_message(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with secured(tmp_path) as broker, broker.open(Role.LEARNER) as learner:
            client = await actor_client(broker)
            js = client.jetstream()
            for number, status in enumerate(STATUSES):
                await js.publish(f"{RUN}.groups.train", b"hostile", headers={"Status": status})
                await js.publish(f"{RUN}.groups.train", b"honest %d" % number)
            await client.close()
            found = await read(learner, 2 * len(STATUSES))
            assert [sequence for sequence, _ in found] == list(range(1, 2 * len(STATUSES) + 1))
            assert [data for _, data in found][1::2] == [b"honest %d" % number for number in range(len(STATUSES))]

    asyncio.run(scenario())


def test_a_header_that_breaks_the_client_is_passed_over(tmp_path: Path) -> None:
    """nats-py 2.16 raises IndexError in its reading task for a header block that is only `NATS/1.0`."""

    async def scenario() -> None:
        async with secured(tmp_path) as broker, broker.open(Role.LEARNER) as learner:
            client = await actor_client(broker)
            js = client.jetstream()
            await js.publish(f"{RUN}.groups.train", b"before")
            broken = b"HPUB %s.groups.train 8 12\r\nNATS/1.0evil\r\n" % RUN.encode()
            await client._send_command(broken)
            await client.flush()
            await js.publish(f"{RUN}.groups.train", b"after")
            await client.close()
            assert await read(learner, 3) == [(1, b"before"), (2, b"evil"), (3, b"after")]
            last = await learner.last(Stream.GROUPS, "groups.train")
            assert last is not None
            assert last.data == b"after"

    asyncio.run(scenario())


def test_a_key_that_the_server_was_made_to_overwrite_is_written_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            secured(tmp_path) as broker,
            broker.open(Role.LEARNER) as learner,
            broker.open(Role.CONTROLLER) as controller,
        ):
            state = StateStore(learner)
            revision = await state.put(Key.PROGRESS, Progress(step=1))
            client = await actor_client(broker)
            for reply in (f"$KV.{RUN}_STATE.progress", f"{RUN}.tickets.train"):
                await client.publish(f"{RUN}.groups.train", b"x", reply=reply)
            await client.flush()
            async with asyncio.timeout(10.0):
                while not (await controller.extent(Stream.TICKETS)).messages:
                    await asyncio.sleep(0.05)
            await client.close()
            assert (await learner.get(Key.PROGRESS) or b"").startswith(b'{"stream"')  # the server's answer to the actor
            assert await state.get(Key.PROGRESS) is None
            watch = StateStore(controller).watch(Key.PROGRESS)
            assert await state.put(Key.PROGRESS, Progress(step=2), revision) > revision
            assert await anext(watch) == Progress(step=2)
            await TicketQueue(controller).issue(make_ticket(0))
            async with broker.open(Role.ACTOR) as actor:
                lease = await TicketQueue(actor).lease(10.0)
                assert lease is not None
                assert lease.ticket == make_ticket(0)
                assert actor.counters.dead_letters == 1

    asyncio.run(scenario())


def test_the_servers_answer_reaches_no_command_of_jetstream(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with secured(tmp_path) as broker, broker.open(Role.LEARNER) as learner:
            client = await actor_client(broker)
            for command in (f"STREAM.DELETE.{RUN}_DEAD", f"STREAM.PURGE.{RUN}_GROUPS", f"STREAM.MSG.GET.{RUN}_GROUPS"):
                await client.publish(f"{RUN}.groups.train", b"x", reply=f"$JS.API.{command}")
            await client.flush()
            assert len(await read(learner, 3)) == 3
            await client.close()
            assert (await learner.extent(Stream.DEAD)).messages == 0
            assert (await learner.extent(Stream.GROUPS)).messages == 3

    asyncio.run(scenario())
