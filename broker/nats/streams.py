"""The streams of a run as data, and how they are created on a server (PROTOCOL.md, "Streams").

Every stream is an append-only file with discard=new: a full stream makes publishers wait and never drops a message.
Only DEAD drops its oldest messages, because it is for people, and any publisher could fill it. Message ids are
remembered for an hour, which outlasts every retry; older repeats are recognised by the ticket's number.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import nats.js.errors
from nats.js import JetStreamContext, api

from horizonrl.broker.api import DEAD_MESSAGES, Stream, dead_bytes
from horizonrl.common.config.schema import BrokerSection
from horizonrl.common.errors import ConfigError
from horizonrl.common.logs import get_logger

log = get_logger()
T = TypeVar("T")

DUPLICATE_WINDOW_S = 3_600.0
ACTORS = "actors"
"""The durable consumer that all actors share: it makes the ticket stream a work queue."""
MAX_WAITING = 100_000
"""Requests for tickets that may wait at once: one per idle actor. The server's default is 512; above it, it refuses."""
UNLIMITED = -1
INSUFFICIENT_STORAGE = 10047
"""nats-server's err_code for a max_bytes that it cannot reserve: it grants at most three quarters of the disk."""
NAME_IN_USE = 10058
"""nats-server's err_code for creating a stream that exists with other settings."""
NO_CLUSTER, NO_PEERS = 10074, 10005
"""nats-server's err_codes for replicas outside a cluster, and for more replicas than the cluster has fit servers."""
PEERS_S = 20.0
"""How long servers that are missing for the replicas may take to join: those of a cluster that starts are not all up,
or not known to its leader yet."""


@dataclass(frozen=True, slots=True)
class StreamSpec:
    stream: Stream
    subject: str
    """All subjects that the stream stores, without the run's prefix."""
    limited: bool = False
    """Whether it holds at most `max_log_bytes`."""
    direct: bool = False
    """Whether readers get the first message as it is too (`reader.py`): only where the writer is trusted with the
    headers, because the server's own headers arrive among them."""


STREAMS = (
    StreamSpec(Stream.TICKETS, "tickets.>"),
    StreamSpec(Stream.GROUPS, "groups.>", limited=True),
    StreamSpec(Stream.WEIGHTS, "weights.>", direct=True),
    StreamSpec(Stream.DEAD, "dead.>"),
)


def stream_spec(stream: Stream) -> StreamSpec:
    return next(spec for spec in STREAMS if spec.stream is stream)


def stream_name(run: str, stream: Stream) -> str:
    return f"{run}_{stream.value}"


def bucket_name(run: str) -> str:
    return f"{run}_STATE"


def news_subject(run: str, key: str) -> str:
    """Return the subject on which the server announces, with an empty message, that a key has a new value."""
    return f"{run}.state.{key}"


def stream_config(run: str, spec: StreamSpec, broker: BrokerSection) -> api.StreamConfig:
    dead, max_log_bytes = spec.stream is Stream.DEAD, broker.max_log_bytes
    return api.StreamConfig(
        name=stream_name(run, spec.stream),
        subjects=[f"{run}.{spec.subject}"],
        # Not a work queue, which deletes what is acknowledged: the last ticket tells how many were issued, and a
        # learner that resumes reads groups again.
        retention=api.RetentionPolicy.LIMITS,
        storage=api.StorageType.FILE,
        discard=api.DiscardPolicy.OLD if dead else api.DiscardPolicy.NEW,
        max_bytes=dead_bytes(max_log_bytes)
        if dead
        else max_log_bytes
        if spec.limited
        else UNLIMITED,
        max_msgs=DEAD_MESSAGES if dead else UNLIMITED,
        duplicate_window=DUPLICATE_WINDOW_S,
        allow_direct=True,
        num_replicas=broker.nats.replicas,
    )


def actors_config(ack_wait_s: float) -> api.ConsumerConfig:
    """Explicit acknowledgement, redelivery after `ack_wait_s`, without limit: the actors end a ticket as void."""
    return api.ConsumerConfig(
        name=ACTORS,
        durable_name=ACTORS,
        ack_policy=api.AckPolicy.EXPLICIT,
        ack_wait=ack_wait_s,
        # ADR 10: a server that stops delivering a ticket leaves it to nobody, and the run would wait for it for ever.
        max_deliver=UNLIMITED,
        # Credit already bounds the tickets in flight. A second bound here could only leave actors idle.
        max_ack_pending=UNLIMITED,
        max_waiting=MAX_WAITING,
    )


async def ensure_streams(js: JetStreamContext, run: str, broker: BrokerSection) -> None:
    """Create the run's streams, consumer and bucket, or bring them to these settings; remove foreign consumers.

    Raises ConfigError if the server cannot change what is there.
    """
    for spec in STREAMS:
        await _ensure_stream(js, stream_config(run, spec, broker))
        ours = ACTORS if spec.stream is Stream.TICKETS else ""
        await _remove_foreign_consumers(js, stream_name(run, spec.stream), ours)
    await _ensure_actors(js, stream_name(run, Stream.TICKETS), actors_config(broker.ack_wait_s))
    # After all streams and the consumer: the other roles wait for the bucket, then use the rest (`_await_streams`).
    await _ensure_bucket(js, run, broker.nats.replicas)
    await _remove_foreign_consumers(js, f"KV_{bucket_name(run)}")


async def _ensure_bucket(js: JetStreamContext, run: str, replicas: int | None) -> None:
    """Create the run's state bucket, every change of which the server announces."""
    bucket = bucket_name(run)
    # Headers only, because every role hears the news, and a progress with many ranges has kilobytes.
    announced = api.RePublish(src=f"$KV.{bucket}.>", dest=news_subject(run, ">"), headers_only=True)
    settings = api.KeyValueConfig(
        bucket, history=1, storage=api.StorageType.FILE, republish=announced, replicas=replicas or 1
    )
    present = await _present_or_created(
        js, f"KV_{bucket}", replicas, lambda: js.create_key_value(settings)
    )
    if present is None:
        return
    # A bucket that another version created is changed in place, which keeps the keys of a run that goes on.
    changes: dict[str, Any] = {} if present.republish == announced else {"republish": announced}
    if replicas not in (None, present.num_replicas):
        changes["num_replicas"] = replicas
    await _change(js, present, changes)


async def _remove_foreign_consumers(js: JetStreamContext, stream: str, ours: str = "") -> None:
    """Remove every consumer but the run's own: beyond its limit of consumers, a server would refuse that one too."""
    # The server lists consumers in pages, so the list is requested until it has only our own.
    while foreign := [
        consumer.name for consumer in await js.consumers_info(stream) if consumer.name != ours
    ]:
        for name in foreign:
            with contextlib.suppress(nats.js.errors.NotFoundError):  # it has ended by itself
                await js.delete_consumer(stream, name)
            log.warning("foreign_consumer_removed", stream=stream, consumer=name)


async def _present_or_created(
    js: JetStreamContext, stream: str, replicas: int | None, create: Callable[[], Awaitable[object]]
) -> api.StreamConfig | None:
    """Return the settings of a stream that exists; create one that does not, and return None."""
    with contextlib.suppress(nats.js.errors.NotFoundError):
        return (await js.stream_info(stream)).config
    try:
        await _retry_with_replicas(stream, replicas, create)
    except nats.js.errors.APIError as error:
        # Else another role has just created it, with settings of its own.
        if error.err_code != NAME_IN_USE:
            raise
        return (await js.stream_info(stream)).config
    return None


async def _ensure_stream(js: JetStreamContext, wanted: api.StreamConfig) -> None:
    """Create a stream, or change only those settings that are ours: an operator may have set a placement."""
    assert wanted.name is not None
    try:
        present = await _present_or_created(
            js, wanted.name, wanted.num_replicas, lambda: js.add_stream(wanted)
        )
    except nats.js.errors.APIError as error:
        if error.err_code != INSUFFICIENT_STORAGE:
            raise
        raise ConfigError(
            f"the broker has no room to reserve for stream {wanted.name}: {wanted.max_bytes} bytes; lower "
            "broker.max_log_bytes, free disk on the broker's machine, or delete the streams of runs that are over"
        ) from error
    if present is None:
        return
    # The settings that the run's guarantees depend on, and no others.
    ours = [
        "subjects",
        "retention",
        "storage",
        "discard",
        "max_bytes",
        "max_msgs",
        "duplicate_window",
        "allow_direct",
    ]
    if wanted.num_replicas is not None:  # else an operator may have set them
        ours.append("num_replicas")
    changes = {
        name: getattr(wanted, name)
        for name in ours
        if getattr(present, name) != getattr(wanted, name)
    }
    await _change(js, present, changes)


async def _change(js: JetStreamContext, present: api.StreamConfig, changes: dict[str, Any]) -> None:
    """Change some settings of a stream in place, which keeps its messages."""
    if not changes:
        return
    if "num_replicas" in changes:
        log.warning(
            "replicas_changed",
            stream=present.name,
            before=present.num_replicas,
            now=changes["num_replicas"],
        )
    try:
        changed = present.evolve(**changes)
        await _retry_with_replicas(
            present.name, changed.num_replicas, lambda: js.update_stream(changed)
        )
    except nats.js.errors.APIError as error:
        # The cluster is electing a leader.
        if isinstance(error, nats.js.errors.ServiceUnavailableError):
            raise
        raise ConfigError(
            f"stream {present.name} exists with other settings ({', '.join(changes)}) that the server will not "
            f"change: {error.description}; give the run another run.name or delete the stream"
        ) from None


async def _retry_with_replicas(
    stream: str | None, replicas: int | None, request: Callable[[], Awaitable[T]]
) -> T:
    """Create or change a stream; wait for servers that have not joined the cluster yet.

    Raises ConfigError if the servers cannot hold the replicas.
    """
    deadline = asyncio.get_running_loop().time() + PEERS_S
    while True:
        try:
            return await request()
        except nats.js.errors.APIError as error:
            if error.err_code == NO_CLUSTER:
                raise ConfigError(
                    f"broker.nats.replicas is {replicas}, but the server at broker.url belongs to no cluster: start "
                    "one with `horizonrl broker RECIPE --cluster 3`, or leave replicas out"
                ) from None
            if error.err_code != NO_PEERS:
                raise
            if asyncio.get_running_loop().time() > deadline:
                raise ConfigError(
                    f"stream {stream} finds no place for broker.nats.replicas = {replicas}: {error.description}. A "
                    "cluster needs that many servers that are up and have room; lower replicas, or start the missing "
                    "servers"
                ) from None
        await asyncio.sleep(1)


async def _ensure_actors(js: JetStreamContext, stream: str, wanted: api.ConsumerConfig) -> None:
    try:
        present = (await js.consumer_info(stream, ACTORS)).config
    except nats.js.errors.NotFoundError:
        present = api.ConsumerConfig()
    # The only setting that comes from a recipe. `add_consumer` changes a consumer that exists in place.
    if present.ack_wait != wanted.ack_wait:
        # `max_waiting` is the one that the server never changes.
        await js.add_consumer(stream, wanted.evolve(max_waiting=present.max_waiting or MAX_WAITING))
