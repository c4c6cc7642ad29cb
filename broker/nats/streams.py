"""The streams of a run, as data, and how they come to be on a server (design.md, "The broker").

Every stream is an append-only file with discard=new: a full stream makes publishers wait, it never drops. DEAD alone
makes room for the newest: it is for people, and whoever may publish may fill it. Message ids are remembered for an
hour, which outlasts every retry; what is older is told apart by the ticket's number.
"""

import contextlib
from dataclasses import dataclass

import nats.js.errors
from nats.js import JetStreamContext, api

from horizonrl.broker.api import Stream
from horizonrl.broker.codec import MAX_RECORD_BYTES
from horizonrl.common.errors import ConfigError
from horizonrl.common.logs import get_logger

log = get_logger()

DUPLICATE_WINDOW_S = 3_600.0
ACTORS = "actors"
"""The durable consumer that all actors share: it makes the ticket stream a work queue."""
UNLIMITED = -1
DEAD_BYTES = 2 * MAX_RECORD_BYTES
"""What DEAD holds at most: so the newest record is there as a whole, however large."""
DEAD_MESSAGES = 10_000
INSUFFICIENT_STORAGE = 10047
"""nats-server's code when a stream's max_bytes, reserved in full, exceed what is left of three quarters of the disk."""


@dataclass(frozen=True, slots=True)
class StreamSpec:
    stream: Stream
    subject: str
    """Everything that the stream takes, without the run's prefix."""
    limited: bool = False
    """Holds at most `max_log_bytes`."""
    direct: bool = False
    """Its messages are asked for as they are, which is four times as fast: only where their writer is trusted with the
    headers, among which the server's own arrive."""


STREAMS = (
    StreamSpec(Stream.TICKETS, "tickets.>"),
    StreamSpec(Stream.GROUPS, "groups.>", limited=True),
    StreamSpec(Stream.WEIGHTS, "weights.>", direct=True),
    StreamSpec(Stream.DEAD, "dead.>"),
)


def spec_of(stream: Stream) -> StreamSpec:
    return next(spec for spec in STREAMS if spec.stream is stream)


def stream_of(subject: str) -> Stream:
    """Return the stream that takes a subject."""
    first = subject.partition(".")[0]
    return next(spec.stream for spec in STREAMS if spec.subject.partition(".")[0] == first)


def stream_name(run: str, stream: Stream) -> str:
    return f"{run}_{stream.value}"


def bucket_name(run: str) -> str:
    return f"{run}_STATE"


def dead_bytes(max_log_bytes: int) -> int:
    """Return what DEAD may hold next to a group log of so many bytes."""
    return min(DEAD_BYTES, max_log_bytes)


def news_subject(run: str, key: str) -> str:
    """Return the subject on which the server says, with an empty message, that it has stored a key's new value."""
    return f"{run}.state.{key}"


def stream_config(run: str, spec: StreamSpec, max_log_bytes: int) -> api.StreamConfig:
    dead = spec.stream is Stream.DEAD
    return api.StreamConfig(
        name=stream_name(run, spec.stream),
        subjects=[f"{run}.{spec.subject}"],
        retention=api.RetentionPolicy.LIMITS,
        storage=api.StorageType.FILE,
        discard=api.DiscardPolicy.OLD if dead else api.DiscardPolicy.NEW,
        max_bytes=dead_bytes(max_log_bytes) if dead else max_log_bytes if spec.limited else UNLIMITED,
        max_msgs=DEAD_MESSAGES if dead else UNLIMITED,
        duplicate_window=DUPLICATE_WINDOW_S,
        allow_direct=spec.direct,
    )


def actors_config(ack_wait_s: float) -> api.ConsumerConfig:
    """Explicit acknowledgement, redelivery after `ack_wait_s`, for ever: it is the actors who end a ticket as void."""
    return api.ConsumerConfig(
        name=ACTORS,
        durable_name=ACTORS,
        ack_policy=api.AckPolicy.EXPLICIT,
        ack_wait=ack_wait_s,
        max_deliver=UNLIMITED,
        max_ack_pending=UNLIMITED,
    )


async def ensure_streams(js: JetStreamContext, run: str, max_log_bytes: int, ack_wait_s: float) -> None:
    """Create what is missing of a run's streams, consumer and bucket, bring what is there to these settings, and remove
    consumers that are not the run's.

    Raises ConfigError when the server cannot change what is there.
    """
    for spec in STREAMS:
        await _ensure_stream(js, stream_config(run, spec, max_log_bytes))
        own = ACTORS if spec.stream is Stream.TICKETS else ""
        await _remove_foreign_consumers(js, stream_name(run, spec.stream), own)
    await _ensure_actors(js, stream_name(run, Stream.TICKETS), actors_config(ack_wait_s))
    await _ensure_bucket(js, run)
    await _remove_foreign_consumers(js, f"KV_{bucket_name(run)}")


async def _ensure_bucket(js: JetStreamContext, run: str) -> None:
    """Create the run's state, whose every change the server tells of."""
    bucket = bucket_name(run)
    told = api.RePublish(src=f"$KV.{bucket}.>", dest=news_subject(run, ">"), headers_only=True)
    try:
        await js.key_value(bucket)
    except nats.js.errors.BucketNotFoundError:
        await js.create_key_value(bucket=bucket, history=1, storage=api.StorageType.FILE, republish=told)
        return
    present = (await js.stream_info(f"KV_{bucket}")).config
    if present.republish != told:
        await js.update_stream(present.evolve(republish=told))


async def _remove_foreign_consumers(js: JetStreamContext, stream: str, own: str = "") -> None:
    """Remove every consumer but the run's own: a server makes only so many, and then refuses that one."""
    while foreign := [found.name for found in await js.consumers_info(stream) if found.name != own]:
        for name in foreign:
            with contextlib.suppress(nats.js.errors.NotFoundError):  # it has ended by itself
                await js.delete_consumer(stream, name)
            log.warning("foreign_consumer_removed", stream=stream, consumer=name)


async def _add_stream(js: JetStreamContext, wanted: api.StreamConfig) -> None:
    try:
        await js.add_stream(wanted)
    except nats.js.errors.APIError as error:
        if error.err_code != INSUFFICIENT_STORAGE:
            raise
        raise ConfigError(
            f"the broker has no room to reserve for stream {wanted.name}: {wanted.max_bytes} bytes; lower "
            "broker.max_log_bytes, free disk on the broker's machine, or delete the streams of runs that are over"
        ) from error


async def _ensure_stream(js: JetStreamContext, wanted: api.StreamConfig) -> None:
    """Leave alone what is not ours to set: an operator may have added replicas or a placement."""
    assert wanted.name is not None
    try:
        present = (await js.stream_info(wanted.name)).config
    except nats.js.errors.NotFoundError:
        await _add_stream(js, wanted)
        return
    ours = ("subjects", "retention", "storage", "discard", "max_bytes", "max_msgs", "duplicate_window", "allow_direct")
    changes = {name: getattr(wanted, name) for name in ours if getattr(present, name) != getattr(wanted, name)}
    if changes:
        try:
            await js.update_stream(present.evolve(**changes))
        except nats.js.errors.APIError as error:
            raise ConfigError(
                f"stream {wanted.name} exists with other settings ({', '.join(changes)}) that the server will not "
                f"change: {error.description}; give the run another run.name or delete the stream"
            ) from None


async def _ensure_actors(js: JetStreamContext, stream: str, wanted: api.ConsumerConfig) -> None:
    try:
        present = (await js.consumer_info(stream, ACTORS)).config
    except nats.js.errors.NotFoundError:
        present = api.ConsumerConfig()
    if present.ack_wait != wanted.ack_wait:
        await js.add_consumer(stream, wanted)
