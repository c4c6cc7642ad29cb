import asyncio
import uuid
from contextlib import aclosing

import pytest
from nats.js import api
from structlog.testing import capture_logs

from horizonrl.broker.api import Key, QueueState, Stream
from horizonrl.broker.memory import parse_stream
from horizonrl.broker.nats.connect import connect
from horizonrl.broker.nats.server import EmbeddedServer
from horizonrl.broker.nats.streams import ACTORS, STREAMS, bucket_name, stream_name, stream_spec
from horizonrl.common.config.schema import BrokerSection
from horizonrl.common.errors import ConfigError


@pytest.fixture
def run() -> str:
    return f"t-{uuid.uuid4().hex[:8]}"


def test_every_stream_has_a_subject_of_its_own() -> None:
    assert [spec.stream for spec in STREAMS] == list(Stream)
    assert all(parse_stream(stream_spec(stream).subject) is stream for stream in Stream)


@pytest.mark.process
async def test_streams_are_durable_files_that_refuse_what_does_not_fit(
    nats_server: EmbeddedServer, run: str
) -> None:
    transport = await connect(run, BrokerSection(url=nats_server.url, max_log_bytes=9_000))
    js = transport._js
    for stream in Stream:
        config = (await js.stream_info(stream_name(run, stream))).config
        assert config.storage == api.StorageType.FILE
        assert config.retention == api.RetentionPolicy.LIMITS
        assert config.discard == (
            api.DiscardPolicy.OLD if stream is Stream.DEAD else api.DiscardPolicy.NEW
        )
        assert config.duplicate_window == 3_600
        assert config.max_bytes == (9_000 if stream in (Stream.GROUPS, Stream.DEAD) else -1)
        assert config.max_msgs == (10_000 if stream is Stream.DEAD else -1)
    consumer = (await js.consumer_info(stream_name(run, Stream.TICKETS), ACTORS)).config
    assert (consumer.ack_policy, consumer.max_deliver, consumer.ack_wait) == (
        api.AckPolicy.EXPLICIT,
        -1,
        30.0,
    )
    await transport.close()


@pytest.mark.process
async def test_connecting_again_changes_what_may_change_and_keeps_the_messages(
    nats_server: EmbeddedServer, run: str
) -> None:
    first = await connect(
        run, BrokerSection(url=nats_server.url, max_log_bytes=9_000, ack_wait_s=30)
    )
    await first.publish("tickets.train", b"t")
    delivery = await first.lease(5.0)
    assert delivery is not None
    second = await connect(
        run, BrokerSection(url=nats_server.url, max_log_bytes=10_000, ack_wait_s=7)
    )
    assert (
        await second._js.stream_info(stream_name(run, Stream.GROUPS))
    ).config.max_bytes == 10_000
    assert (
        await second._js.consumer_info(stream_name(run, Stream.TICKETS), ACTORS)
    ).config.ack_wait == 7
    await delivery.acknowledge()
    assert await second.queue() == QueueState(waiting=0, leased=0, floor=1)
    await first.close()
    await second.close()


@pytest.mark.process
async def test_roles_that_create_the_streams_at_the_same_time_all_connect(
    nats_server: EmbeddedServer, run: str
) -> None:
    sizes = [(number + 1) * 9_000 for number in range(8)]
    settings = [BrokerSection(url=nats_server.url, max_log_bytes=size) for size in sizes]
    transports = await asyncio.gather(*(connect(run, each) for each in settings))
    log = await transports[0]._js.stream_info(stream_name(run, Stream.GROUPS))
    assert log.config.max_bytes in sizes
    for transport in transports:
        await transport.close()


@pytest.mark.process
async def test_a_stream_that_cannot_be_changed_is_named(
    nats_server: EmbeddedServer, run: str
) -> None:
    other = await connect(f"{run}-other", BrokerSection(url=nats_server.url))
    await other._js.add_stream(
        name=stream_name(run, Stream.GROUPS),
        subjects=[f"{run}.groups.>"],
        storage=api.StorageType.MEMORY,
    )
    with pytest.raises(ConfigError, match=rf"{run}_GROUPS.*storage"):
        await connect(run, BrokerSection(url=nats_server.url))
    await other.close()


@pytest.mark.process
def test_a_log_larger_than_the_disk_is_refused_with_what_to_do(
    nats_server: EmbeddedServer, run: str
) -> None:
    with pytest.raises(ConfigError, match=r"1125899906842624 bytes; lower broker\.max_log_bytes"):
        asyncio.run(connect(run, BrokerSection(url=nats_server.url, max_log_bytes=1 << 50)))


@pytest.mark.process
async def test_readers_and_watches_make_no_consumer(nats_server: EmbeddedServer, run: str) -> None:
    transport = await connect(run, BrokerSection(url=nats_server.url))
    for stream, subject in ((Stream.GROUPS, "groups.train"), (Stream.WEIGHTS, "weights.frame")):
        await transport.publish(subject, b"x")
        reader = await transport.reader(stream, 0)
        assert len(await reader.fetch(1, 5.0)) == 1
        assert await transport._js.consumers_info(stream_name(run, stream)) == []
    await transport.put(Key.PROGRESS, b"p")
    async with aclosing(transport.watch(Key.PROGRESS)) as watch:
        assert await anext(watch) == b"p"
        assert await transport._js.consumers_info(f"KV_{bucket_name(run)}") == []
    await transport.close()


@pytest.mark.process
async def test_consumers_that_are_not_the_runs_are_removed_and_reported(
    nats_server: EmbeddedServer, run: str
) -> None:
    transport = await connect(run, BrokerSection(url=nats_server.url))
    names = [*(stream_name(run, stream) for stream in Stream), f"KV_{bucket_name(run)}"]
    for name in names:
        await transport._js.add_consumer(name, durable_name="spy", ack_policy=api.AckPolicy.NONE)
    with capture_logs() as logs:
        again = await connect(run, BrokerSection(url=nats_server.url))
    logged = [
        log["stream"]
        for log in logs
        if log["event"] == "foreign_consumer_removed" and log["consumer"] == "spy"
    ]
    assert logged == names
    left = [consumer.name for name in names for consumer in await again._js.consumers_info(name)]
    assert left == [ACTORS]
    await transport.close()
    await again.close()


@pytest.mark.process
async def test_a_bucket_of_an_earlier_version_tells_of_its_changes(
    nats_server: EmbeddedServer, run: str
) -> None:
    other = await connect(f"{run}-other", BrokerSection(url=nats_server.url))
    await other._js.create_key_value(bucket=bucket_name(run), history=1)
    transport = await connect(run, BrokerSection(url=nats_server.url))
    await transport.put(Key.POLICY, b"1")
    async with aclosing(transport.watch(Key.POLICY)) as watch, asyncio.timeout(10.0):
        assert await anext(watch) == b"1"
        await transport.put(Key.POLICY, b"2")
        assert await anext(watch) == b"2"
    await transport.close()
    await other.close()
