"""Open a run's transport on NATS: credentials, TLS, streams. The one place that knows how to reach a server."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import nats.js.errors
import stamina

from horizonrl.broker.api import Stream
from horizonrl.broker.nats.access import Role, inbox
from horizonrl.broker.nats.folder import public_key
from horizonrl.broker.nats.link import Link
from horizonrl.broker.nats.streams import ACTORS, bucket_name, ensure_streams, stream_name
from horizonrl.broker.nats.transport import NatsTransport
from horizonrl.common.config.schema import BrokerSection
from horizonrl.common.errors import BrokerUnreachable, ConfigError
from horizonrl.common.logs import get_logger

log = get_logger()

RECONNECT_WAIT_S = 0.2
PING_S = 5
"""A connection that is silently dead is noticed after two of these."""
STREAMS_WAIT_S = 120.0
"""Within this a controller's pod has fetched its image and started."""
STREAMS_POLL_S = 0.5
PENDING_BYTES = 128 << 20
"""Above this the client waits inside a publish, where nats-py 2.16 swallows a cancellation."""


@asynccontextmanager
async def connected(run: str, broker: BrokerSection, role: Role = Role.CONTROLLER) -> AsyncIterator[NatsTransport]:
    """Hold a run's transport open while the body runs (see `connect`)."""
    transport = await connect(run, broker, role)
    try:
        yield transport
    finally:
        await transport.close()


async def connect(run: str, broker: BrokerSection, role: Role = Role.CONTROLLER) -> NatsTransport:
    """Connect to `broker.url` as a role; the controller creates the run's streams, the others wait for them.

    Raises BrokerUnreachable after `connect_timeout_s`, BrokerDenied for wrong credentials and certificates, ConfigError
    for a url that is none. Afterwards the connection is kept for ever: it survives any number of server restarts.
    """
    if broker.url is None:
        raise ConfigError("broker.url is none: write it as nats://HOST:PORT, or tls://HOST:PORT for TLS")
    servers = broker.servers
    credentials = _credentials(broker)
    stamina.instrumentation.set_on_retry_hooks([])  # the link tells of repeats; stamina's own hook would warn of each
    link = Link(",".join(servers), encrypted=broker.ca_file is not None)
    try:
        async with asyncio.timeout(broker.connect_timeout_s):
            await link.client.connect(
                servers,
                name=f"horizonrl {run}",
                max_reconnect_attempts=-1,
                reconnect_time_wait=RECONNECT_WAIT_S,  # type: ignore[arg-type]  # the client only sleeps for it
                ping_interval=PING_S,
                pending_size=PENDING_BYTES,
                error_cb=link.on_error,
                disconnected_cb=link.on_disconnected,
                reconnected_cb=link.on_reconnected,
                closed_cb=link.on_closed,
                inbox_prefix=inbox(run, role, _user(broker)),
                **credentials,
            )
            link.opened()
            if role is Role.CONTROLLER:
                await link.ask(
                    lambda: ensure_streams(link.client.jetstream(), run, broker.max_log_bytes, broker.ack_wait_s),
                    deadline_s=None,
                )
        if role is Role.CONTROLLER:
            return NatsTransport(link, run, broker.ack_wait_s)
        patience_s = broker.connect_timeout_s if role is Role.MONITOR else STREAMS_WAIT_S
        return NatsTransport(link, run, await _await_streams(link, run, patience_s))
    except TimeoutError:
        link.raise_refusal()
        await link.close()
        raise BrokerUnreachable(
            f"no nats-server with JetStream answers at {link.url} within {broker.connect_timeout_s} s: does it run, "
            "and is the address right? `horizonrl broker RECIPE` starts one; `train` without broker.url has its own"
        ) from None
    except BaseException:
        await link.close()
        raise


async def _await_streams(link: Link, run: str, patience_s: float) -> float:
    """Wait until the controller has created the run's streams; return the `ack_wait_s` that it has set.

    There is nothing to wake a waiter before there are streams, so they are looked for.
    """
    js = link.client.jetstream()
    try:
        async with asyncio.timeout(patience_s):
            while True:
                with contextlib.suppress(nats.js.errors.NotFoundError):
                    await link.ask(lambda: js.stream_info(f"KV_{bucket_name(run)}"))  # the last one that is created
                    consumer = await link.ask(lambda: js.consumer_info(stream_name(run, Stream.TICKETS), ACTORS))
                    return float(consumer.config.ack_wait or 0.0)
                log.info("streams_awaited", run=run)
                await asyncio.sleep(STREAMS_POLL_S)
    except TimeoutError:
        raise BrokerUnreachable(
            f"{link.url} has no streams of run {run} after {patience_s:g} s: start its controller, which creates "
            "them, or check run.name"
        ) from None


def _credentials(broker: BrokerSection) -> dict[str, Any]:
    """Return what the client proves itself with. Raises ConfigError for a file that is missing or holds no key."""
    for name in ("credentials", "nkey_seed", "ca_file"):
        path: Path | None = getattr(broker, name)
        if path is not None and not path.is_file():
            raise ConfigError(f"broker.{name} is {path}: there is no such file")
    given: dict[str, Any] = {}
    if broker.user is not None:
        given["user"] = broker.user
    if broker.password is not None:
        given["password"] = broker.password.get_secret_value()
    if broker.credentials is not None:
        given["user_credentials"] = str(broker.credentials)
    if broker.nkey_seed is not None:
        given["nkeys_seed"] = str(broker.nkey_seed)
    if broker.ca_file is not None:
        try:
            given["tls"] = ssl.create_default_context(cafile=str(broker.ca_file))
        except ssl.SSLError:
            raise ConfigError(f"broker.ca_file is {broker.ca_file}: it holds no certificate") from None
    return given


def _user(broker: BrokerSection) -> str:
    """Return the public nkey of `broker.nkey_seed`, or "". Raises ConfigError for a file that holds no seed."""
    if broker.nkey_seed is None:
        return ""
    try:
        return public_key(broker.nkey_seed)
    except ValueError:
        raise ConfigError(
            f"broker.nkey_seed is {broker.nkey_seed}: it holds no nkey seed; make one with `horizonrl broker keys`"
        ) from None
