"""Open a run's transport on NATS: credentials, TLS, streams. The one place that knows how to reach a server."""

import asyncio
import re
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import stamina

from horizonrl.broker.link import Link, log_repeat
from horizonrl.broker.nats_transport import NatsTransport
from horizonrl.broker.streams import ensure_streams
from horizonrl.common.config import BrokerSection
from horizonrl.common.errors import BrokerUnreachable, ConfigError

RECONNECT_WAIT_S = 0.2
SCHEMES = ("nats", "tls", "ws", "wss")
PING_S = 5
"""A connection that is silently dead is noticed after two of these."""
PENDING_BYTES = 128 << 20
"""Above this the client waits inside a publish, where nats-py 2.16 swallows a cancellation."""


@asynccontextmanager
async def connected(run: str, broker: BrokerSection) -> AsyncIterator[NatsTransport]:
    """Hold a run's transport open while the body runs (see `connect`)."""
    transport = await connect(run, broker)
    try:
        yield transport
    finally:
        await transport.close()


async def connect(run: str, broker: BrokerSection) -> NatsTransport:
    """Connect to `broker.url` and make sure that the run's streams are there.

    Raises BrokerUnreachable after `connect_timeout_s`, BrokerDenied for wrong credentials, ConfigError for a url that
    is none. Afterwards the connection is kept for ever: it survives any number of server restarts.
    """
    servers = _servers(broker.url)
    stamina.instrumentation.set_on_retry_hooks([log_repeat])
    link = Link(",".join(re.sub(r"//[^@/]*@", "//", server) for server in servers))  # no password: it appears in logs
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
                **_credentials(broker),
            )
            link.opened()
            await link.ask(
                lambda: ensure_streams(link.client.jetstream(), run, broker.max_log_bytes, broker.ack_wait_s),
                deadline_s=None,
            )
        return NatsTransport(link, run, broker.ack_wait_s)
    except TimeoutError:
        await link.close()
        raise BrokerUnreachable(
            f"no nats-server with JetStream answers at {link.url} within {broker.connect_timeout_s} s: is nats-server "
            "running there? Omit broker.url to start an embedded one"
        ) from None
    except BaseException:
        await link.close()
        raise


def _servers(url: str | None) -> list[str]:
    """Return the servers of a url: one, or those of a cluster separated by commas."""
    servers = [server.strip() for server in (url or "").split(",")]
    for server in servers:
        try:
            parts = urlsplit(server)
            known = parts.scheme in SCHEMES and parts.hostname is not None and parts.port != 0
        except ValueError:
            known = False
        if not known:
            raise ConfigError(f"broker.url is {url!r}: write it as nats://HOST:PORT, or tls://HOST:PORT for TLS")
    return servers


def _credentials(broker: BrokerSection) -> dict[str, Any]:
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
        given["tls"] = ssl.create_default_context(cafile=str(broker.ca_file))
    return given
