"""What an actor can do to the others with what it may publish, on a real nats-server."""

import asyncio
import json
from pathlib import Path

import pytest
from nats.aio.msg import Msg

from horizonrl.broker.api import Key, Message, Role, Stream, Transport
from horizonrl.broker.log_continuity import entry_digest
from horizonrl.broker.nats.access import hears, inbox, names, publishes
from horizonrl.broker.nats.key_folder import public_key
from horizonrl.broker.signing import TicketSigner
from horizonrl.broker.state import StateStore
from horizonrl.broker.tickets import TicketQueue
from horizonrl.common.state import HorizonState
from tests.broker.secured import OTHER, RUN, Secured, secured
from tests.records import make_ticket

pytestmark = pytest.mark.process

STATUSES = ("408", "100", "503", "500", "abc")


async def read(transport: Transport, count: int) -> list[tuple[int, bytes]]:
    reader = await transport.reader(Stream.GROUPS, 0)
    found: list[tuple[int, bytes]] = []
    async with asyncio.timeout(60.0):
        while len(found) < count:
            found += [(message.sequence, message.data) for message in await reader.fetch(8, 30.0)]
    await reader.close()
    return found


async def test_a_header_that_looks_like_a_word_of_the_server_hides_no_message(
    tmp_path: Path,
) -> None:
    async with secured(tmp_path) as broker, broker.open(Role.LEARNER) as learner:
        async with broker.client(Role.ACTOR) as client:
            js = client.jetstream()
            for number, status in enumerate(STATUSES):
                await js.publish(f"{RUN}.groups.train", b"hostile", headers={"Status": status})
                await js.publish(f"{RUN}.groups.train", b"honest %d" % number)
        found = await read(learner, 2 * len(STATUSES))
        assert [sequence for sequence, _ in found] == list(range(1, 2 * len(STATUSES) + 1))
        assert [data for _, data in found][1::2] == [
            b"honest %d" % number for number in range(len(STATUSES))
        ]


async def test_a_header_that_breaks_the_client_costs_its_reader_nothing(tmp_path: Path) -> None:
    """nats-py 2.16 raises IndexError in its reading task for a header block that is only `NATS/1.0`."""

    async with secured(tmp_path) as broker, broker.open(Role.LEARNER) as learner:
        reading = asyncio.create_task(read(learner, 3))
        async with broker.client(Role.ACTOR) as client:
            js = client.jetstream()
            await js.publish(f"{RUN}.groups.train", b"before")
            broken = b"HPUB %s.groups.train 8 12\r\nNATS/1.0evil\r\n" % RUN.encode()
            await client._send_command(broken)
            await client.flush()
            await js.publish(f"{RUN}.groups.train", b"after")
        assert await reading == [(1, b"before"), (2, b"evil"), (3, b"after")]
        assert learner.counters.reconnects == 0
        last = await learner.last(Stream.GROUPS, "groups.train")
        assert last is not None
        assert last.data == b"after"


BLOCKS = (
    b"",
    b"NATS/1.0",
    b"NATS/1.0\r\nHonest: yes\r\n\r\n",
    b"NATS/1.0 404 Message Not Found\r\n\r\n",
    b"NATS/1.0 204 EOB\r\nNats-Num-Pending: 0\r\nNats-Last-Sequence: 3\r\n\r\n",
    b"NATS/1.0 503\r\n\r\n",
    b"NATS/1.0\r\nNats-Sequence: 99\r\nNats-Subject: other\r\nNats-Stream: other\r\n\r\n",
    b"NATS/1.0\r\nNats-Stream: S\r\nNats-Subject: other\r\nNats-Sequence: 99\r\n"
    b"Nats-Time-Stamp: 2000-01-01T00:00:00Z\r\nNats-Num-Pending: 0\r\nNats-Last-Sequence: 0\r\n\r\n",
    b"NATS/1.0\r\nNo: end",
    b"NATS/1.0\r\nNats-Stream: ..",
    b"NATS/1.0\r\n\r\n\r\n\r\n",
    b"\xff\x00 : \r\n\r\n",
)
"""Header blocks that nats-server stores as they are."""


async def test_no_header_block_hides_a_message_of_a_batch_or_changes_what_another_way_of_reading_finds(
    tmp_path: Path,
) -> None:
    async with secured(tmp_path) as broker, broker.open(Role.LEARNER) as learner:
        subject = f"{RUN}.groups.train"
        async with broker.client(Role.ACTOR) as client:
            js = client.jetstream()
            await js.publish(subject, b"before")
            for number, block in enumerate(BLOCKS):
                command = b"HPUB %s %d %d\r\n" % (subject.encode(), len(block), len(block) + 4)
                await client._send_command(command + block + b"%04d\r\n" % number)
            await client.flush()
            await js.publish(subject, b"after")
        count = len(BLOCKS) + 2
        reader, batch = await learner.reader(Stream.GROUPS, 0), list[Message]()
        while len(batch) < count:
            batch += await reader.fetch(count, 30.0)
        assert [message.data for message in batch] == [
            b"before",
            *(b"%04d" % n for n in range(len(BLOCKS))),
            b"after",
        ]
        assert [message.sequence for message in batch] == list(range(1, count + 1))
        # A new reader asks the leader for its first message.
        for message in batch:
            single = (
                await (await learner.reader(Stream.GROUPS, message.sequence - 1)).fetch(1, 30.0)
            )[0]
            assert (single, entry_digest(single)) == (message, entry_digest(message))
        assert learner.counters.reconnects == 0


def requests(role: Role) -> list[str]:
    """Return what a role may ask JetStream that changes nothing, each of which is answered."""
    calls = ("$JS.API.INFO", "STREAM.INFO", "MSG.GET", "DIRECT.GET", "CONSUMER.INFO", "MSG.NEXT")
    return [subject for subject in publishes(RUN, role) if any(call in subject for call in calls)]


def beyond(role: Role) -> list[str]:
    """Return the subjects that a role may not publish to and others may, and a few that nobody may."""
    everyone = {subject for other in Role for subject in publishes(RUN, other)} - set(
        publishes(RUN, role)
    )
    others = [f"$JS.API.STREAM.DELETE.{RUN}_DEAD", f"{RUN}.state.progress", f"{OTHER}.groups.train"]
    return [*(subject.replace("*", "x").replace(">", "x") for subject in sorted(everyone)), *others]


async def stored(broker: Secured) -> dict[str, tuple[int, int]]:
    """Return what the streams of both runs hold: how many messages, up to which sequence."""
    held = {}
    for run in (RUN, OTHER):
        async with broker.open(Role.CONTROLLER, run) as controller:
            for name in names(run):
                state = (await controller._js.stream_info(name)).state
                held[name] = (state.messages, state.last_seq)
    return held


@pytest.mark.parametrize("role", [Role.MONITOR, Role.ACTOR, Role.LEARNER])
async def test_an_answer_reaches_no_subject_that_its_asker_may_not_publish_to(
    tmp_path: Path, role: Role
) -> None:
    """nats-server sends its answer to the reply subject of a request, whoever may publish there."""

    async with secured(tmp_path) as broker, broker.open(Role.CONTROLLER) as controller:
        await TicketQueue(controller).issue(make_ticket(0))
        await StateStore(controller).put(Key.HORIZON, HorizonState())
        before = await stored(broker)
        last = {"last_by_subj": f"$KV.{RUN}_STATE.horizon"}  # an answer whose text is another's
        async with broker.client(role) as client:
            for reply in beyond(role):
                for subject in requests(role):
                    body = b"" if "MSG" not in subject else json.dumps(last).encode()
                    await client.publish(subject, body, reply=reply)
            await client.flush()
            await client.request("$JS.API.INFO")  # the others have been answered
        assert await stored(broker) == before


@pytest.mark.parametrize(
    "reserved", [f"$JS.ACK.{RUN}_TICKETS.actors.1.1.1.1.0", "_R_.x.y", "_GR_.x.y.z"]
)
async def test_an_answer_is_no_acknowledgement(tmp_path: Path, reserved: str) -> None:
    async with secured(tmp_path) as broker:
        errors: list[str] = []
        async with broker.client(Role.MONITOR, errors=errors) as client:
            await client.publish("$JS.API.INFO", b"", reply=reserved)
            await client.flush()
        assert [text for text in errors if "permissions violation for publish with reply" in text]


async def test_what_is_traced_or_rolled_up_stays_within_what_its_sender_may(tmp_path: Path) -> None:
    """Headers that make nats-server publish or purge on a client's behalf."""

    async with secured(tmp_path) as broker, broker.open(Role.LEARNER) as learner:
        errors: list[str] = []
        async with broker.client(Role.ACTOR, errors=errors) as client:
            await client.jetstream().publish(f"{RUN}.groups.train", b"honest")
            for subject in (f"{RUN}.tickets.train", f"$KV.{RUN}_STATE.progress"):
                await client.publish(
                    f"{RUN}.groups.void", b"x", headers={"Nats-Trace-Dest": subject}
                )
            await client.flush()
            for word in ("all", "sub"):
                await client.publish(f"{RUN}.groups.void", b"x", headers={"Nats-Rollup": word})
            await client.request("$JS.API.INFO")
        assert len([text for text in errors if "permissions violation for publish" in text]) == 2
        assert (await learner.extent(Stream.TICKETS)).messages == 0
        assert await learner.get(Key.PROGRESS) is None
        assert (await learner.extent(Stream.GROUPS)).messages == 1


async def test_an_actor_hears_nothing_of_another(tmp_path: Path) -> None:
    """What it may subscribe to brings neither the other's ticket nor its answers."""

    async with (
        secured(tmp_path) as broker,
        broker.open(Role.CONTROLLER) as controller,
        broker.open(Role.ACTOR, number=0) as working,
        broker.client(Role.ACTOR, number=1) as spy,
    ):
        heard: list[str] = []

        async def hear(message: Msg) -> None:
            heard.append(message.subject)

        own = inbox(RUN, Role.ACTOR, public_key(broker.keys.seed(RUN, Role.ACTOR, 1)))
        for subject in (f"{own}.>", hears(RUN)):
            await spy.subscribe(subject, cb=hear)
        await spy.flush()
        await TicketQueue(controller, TicketSigner(RUN, b"k" * 32)).issue(make_ticket(0))
        lease = await TicketQueue(working).lease(10.0)
        assert lease is not None
        assert lease.ticket.signature
        await lease.acknowledge()
        await spy.flush()
        assert heard == []
        await StateStore(controller).put(Key.HORIZON, HorizonState())
        async with asyncio.timeout(10.0):
            while not heard:
                await asyncio.sleep(0.01)
        assert heard == [f"{RUN}.state.horizon"]


async def test_what_everyone_hears_of_a_key_is_only_that_it_was_set(tmp_path: Path) -> None:
    """The others of an account can be sent what looks like it: then they ask for the key, and find it unchanged."""

    async with (
        secured(tmp_path) as broker,
        broker.open(Role.LEARNER) as learner,
        broker.open(Role.ACTOR) as actor,
        broker.client(Role.ACTOR, number=1) as spy,
    ):
        watch = actor.watch(Key.PROGRESS)
        await learner.put(Key.PROGRESS, b"1")
        assert await anext(watch) == b"1"
        following = asyncio.ensure_future(anext(watch))
        for _ in range(20):
            await spy.publish("$JS.API.INFO", b"", reply=f"{RUN}.state.progress")
        await spy.flush()
        await spy.request("$JS.API.INFO")
        await learner.put(Key.PROGRESS, b"2")
        assert await following == b"2"
