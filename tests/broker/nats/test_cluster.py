"""Three real nats-servers: any may be killed, paused or cut off, and nothing acknowledged is lost or doubled."""

import asyncio
import os
import signal
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from nats.js.errors import BadRequestError

from horizonrl.broker.api import Key, Role, Stream
from horizonrl.broker.nats import streams
from horizonrl.broker.nats.cluster import EmbeddedCluster
from horizonrl.broker.nats.connect import connect
from horizonrl.broker.nats.key_folder import KeyFolder
from horizonrl.broker.nats.keys import make_keys
from horizonrl.broker.nats.server import EmbeddedServer
from horizonrl.broker.nats.transport import NatsTransport
from horizonrl.common.config.nats import NatsSection
from horizonrl.common.config.schema import BrokerSection
from horizonrl.common.errors import BrokerUnreachable, ConfigError, RunUnknown
from tests.faults.servers import Servers, serving

pytestmark = pytest.mark.process
R3 = NatsSection(replicas=3)


@asynccontextmanager
async def opened(
    url: str, role: Role = Role.CONTROLLER, nats: NatsSection = R3, run: str = "r"
) -> AsyncIterator[NatsTransport]:
    transport = await connect(run, BrokerSection(url=url, nats=nats, ack_wait_s=3), role)
    try:
        yield transport
    finally:
        await transport.close()


async def kill(servers: Servers, number: int) -> None:
    await servers.members[number].kill()
    await asyncio.sleep(1)
    await servers.members[number].start()


async def pause(servers: Servers, number: int) -> None:
    os.kill(servers.members[number].pid, signal.SIGSTOP)
    await asyncio.sleep(4)
    os.kill(servers.members[number].pid, signal.SIGCONT)


async def isolate(servers: Servers, number: int) -> None:
    """Cut a server off from the others, but not from its clients, who have to leave it."""
    lines = list(servers.lines(number, with_clients=False))
    for line in lines:
        line.hold()
        line.break_connections()
    await asyncio.sleep(9)
    for line in lines:
        line.release()


async def test_nothing_is_lost_or_doubled_while_leaders_are_killed_paused_and_cut_off(
    tmp_path: Path,
) -> None:
    stop = asyncio.Event()
    acknowledged: dict[str, int] = {}
    done: list[int] = []

    async def publish(transport: NatsTransport, name: str) -> None:
        number = 0
        while not stop.is_set():
            message_id = f"{name}-{number}"
            stored = await transport.publish(
                "groups.train", os.urandom(5_000), message_id=message_id
            )
            acknowledged[message_id] = stored.sequence
            number += 1

    async def work(controller: NatsTransport, actor: NatsTransport) -> None:
        while not stop.is_set():
            await controller.publish("tickets.train", b"t", message_id=uuid.uuid4().hex)
            delivery = await actor.lease(60)
            assert delivery is not None
            try:
                await delivery.acknowledge()
            except BrokerUnreachable:
                continue  # no answer within `ack_wait_s`: the ticket is delivered again
            done.append(delivery.message.sequence)

    async def announce(learner: NatsTransport) -> None:
        """A learner that nobody replaces is never told that somebody did, and reads its own writes."""
        revision, number = 0, 0
        while not stop.is_set():
            revision, number = (
                await learner.put(Key.PROGRESS, b"%d" % number, revision),
                number + 1,
            )
            assert await learner.revision(Key.PROGRESS) == revision
            assert await learner.get(Key.PROGRESS) == b"%d" % (number - 1)

    async with (
        serving(tmp_path, 3) as servers,
        opened(servers.url) as controller,
        opened(servers.url, Role.ACTOR) as actor,
        opened(servers.url, Role.LEARNER) as learner,
        opened(servers.direct_url, Role.MONITOR) as monitor,
        asyncio.TaskGroup() as group,
    ):
        load = (
            publish(actor, "a"),
            publish(controller, "b"),
            work(controller, actor),
            announce(learner),
        )
        tasks = [group.create_task(each) for each in load]
        for harm, led in ((kill, Stream.GROUPS), (pause, None), (isolate, Stream.TICKETS)):
            await asyncio.sleep(0.5)
            while (leader := await monitor.leader(led)) is None:
                await asyncio.sleep(0.1)  # an election is under way
            await harm(servers, servers.number(leader))
        stop.set()
        await asyncio.wait(tasks)
        reader = await learner.reader(Stream.GROUPS, 0)
        found: dict[int, str | None] = {}
        while len(found) < len(acknowledged):
            messages = await reader.fetch(64, 30)
            assert messages
            found |= {message.sequence: message.message_id for message in messages}
        assert all(found[sequence] == name for name, sequence in acknowledged.items())
        assert len(set(found.values())) == len(found)
        assert len(done) > 3


async def copies(transport: NatsTransport) -> set[int]:
    names = [f"r_{stream.value}" for stream in Stream] + ["KV_r_STATE"]
    return {(await transport._js.stream_info(name)).config.num_replicas for name in names}


async def test_replicas_are_raised_lowered_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with EmbeddedCluster(tmp_path) as cluster:
        async with opened(cluster.url, nats=NatsSection()) as single:
            assert await copies(single) == {1}
            await single.publish("groups.train", b"kept", message_id="a")
        for section, wanted in ((R3, 3), (NatsSection(), 3), (NatsSection(replicas=1), 1)):
            async with opened(cluster.url, nats=section) as transport:
                assert await copies(transport) == {wanted}
                assert (await transport.extent(Stream.GROUPS)).messages == 1
        monkeypatch.setattr(streams, "PEERS_S", 0.5)
        with pytest.raises(
            ConfigError, match=r"replicas = 5.*enough|replicas = 5.*needs that many servers"
        ):
            await connect("other", BrokerSection(url=cluster.url, nats=NatsSection(replicas=5)))


def test_a_stream_waits_for_servers_that_have_not_joined_yet() -> None:
    """A cluster that starts on a busy machine was seen to refuse so for a moment: no suitable peers, peer offline."""
    answers = [BadRequestError(code=400, err_code=streams.NO_PEERS, description="peer offline")] * 2

    async def create() -> str:
        if answers:
            raise answers.pop()
        return "created"

    assert asyncio.run(streams._retry_with_replicas("r_GROUPS", 3, create)) == "created"
    assert not answers


def test_a_role_that_starts_before_the_cluster_has_a_leader_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without most of its servers, a cluster can say neither that there are streams nor that there are none."""

    async def scenario() -> None:
        async with serving(tmp_path, 3) as servers:
            # All of them: a leader that survives its followers goes on answering for some seconds.
            for server in servers.members:
                await server.kill()
            await servers.members[0].start()
            section = BrokerSection(url=servers.members[0].url)
            with monkeypatch.context() as patch:
                patch.setattr("horizonrl.broker.nats.connect.ELECTION_S", 1.5)
                with pytest.raises(BrokerUnreachable, match="no leader"):
                    await connect("r", section, Role.ACTOR, existing=True)
            async with asyncio.TaskGroup() as group:
                answer = group.create_task(look(section))
                await asyncio.sleep(3)
                assert not answer.done()
                for server in servers.members[1:]:
                    await server.start()
            assert answer.result() == "no streams"

    async def look(section: BrokerSection) -> str:
        try:
            await connect("r", section, Role.ACTOR, existing=True)
        except RunUnknown:
            return "no streams"
        return "streams"

    asyncio.run(asyncio.wait_for(scenario(), 120))


def test_a_single_server_holds_no_replicas_and_says_what_does(nats_server: EmbeddedServer) -> None:
    with pytest.raises(ConfigError, match=r"replicas is 3.*no cluster.*--cluster 3"):
        asyncio.run(connect("alone", BrokerSection(url=nats_server.url, nats=R3)))


async def test_a_client_leaves_a_server_that_takes_nothing(tmp_path: Path) -> None:
    """What it has buffered for the paused server must not hold it there."""

    async with serving(tmp_path, 3) as servers, opened(servers.direct_url) as transport:
        url = transport._connection.client.connected_url
        assert url is not None
        (paused,) = [server for server in servers.members if server.url.endswith(f":{url.port}")]
        os.kill(paused.pid, signal.SIGSTOP)
        try:
            async with asyncio.timeout(45), asyncio.TaskGroup() as group:
                for number in range(12):  # more than the sockets of both sides buffer
                    group.create_task(
                        transport.publish(
                            "groups.train", bytes(4_000_000), message_id=f"large-{number}"
                        )
                    )
        finally:
            os.kill(paused.pid, signal.SIGCONT)
        assert transport.counters.reconnects >= 1
        assert (await transport.extent(Stream.GROUPS)).messages == 12


async def test_accounts_hold_across_the_servers_of_a_cluster(tmp_path: Path) -> None:
    keys = KeyFolder(tmp_path / "keys")
    make_keys(keys.folder, ["r"], ["127.0.0.1"])
    async with EmbeddedCluster(
        tmp_path / "nats", extra=keys.included(tmp_path / "nats" / "server-0")
    ) as cluster:
        own: Callable[[Role], NatsSection] = lambda role: NatsSection(  # noqa: E731
            replicas=3, nkey_seed=keys.seed("r", role), ca_file=keys.authority
        )
        urls = [server.url for server in cluster.servers]
        async with (
            opened(urls[0], Role.CONTROLLER, own(Role.CONTROLLER)) as controller,
            opened(urls[1], Role.ACTOR, own(Role.ACTOR)) as actor,
            opened(urls[2], Role.LEARNER, own(Role.LEARNER)) as learner,
        ):
            await controller.publish("tickets.train", b"t", message_id="t")
            delivery = await actor.lease(20)
            assert delivery is not None
            await actor.publish("groups.train", b"g", message_id="g")
            await delivery.acknowledge()
            reader = await learner.reader(Stream.GROUPS, 0)
            assert [message.data for message in await reader.fetch(1, 20)] == [b"g"]
            assert await learner.put(Key.PROGRESS, b"p", 0) > 0
            values = actor.watch(Key.PROGRESS)
            assert await anext(values) == b"p"
            heard: Awaitable[bytes] = anext(values)
            await learner.put(Key.PROGRESS, b"q")
            assert await asyncio.wait_for(heard, 20) == b"q"
