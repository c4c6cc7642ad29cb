"""Open a run's transport on NATS: credentials, TLS, streams. The one place that knows how to reach a server."""

import asyncio
import re
import ssl
from typing import Any

import nats.errors

from horizonrl.broker.link import Link
from horizonrl.broker.nats_transport import NatsTransport
from horizonrl.broker.streams import ensure_streams
from horizonrl.common.config import BrokerSection
from horizonrl.common.errors import BrokerUnreachable, ConfigError

RECONNECT_WAIT_S = 0.2
PING_S = 5
"""A connection that is silently dead is noticed after two of these."""


async def connect(run: str, broker: BrokerSection) -> NatsTransport:
    """Connect to `broker.url` and make sure that the run's streams are there.

    Raises BrokerUnreachable after `connect_timeout_s`, BrokerDenied for wrong credentials, ConfigError for a url that
    is none. Afterwards the connection is kept for ever: it survives any number of server restarts.
    """
    if broker.url is None:
        raise ConfigError("broker.url is not set: give nats://HOST:PORT of a running nats-server")
    link = Link(re.sub(r"//[^@/]*@", "//", broker.url))  # without a password: it appears in logs
    try:
        async with asyncio.timeout(broker.connect_timeout_s):
            await link.client.connect(
                broker.url,
                name=f"horizonrl {run}",
                max_reconnect_attempts=-1,
                reconnect_time_wait=RECONNECT_WAIT_S,  # type: ignore[arg-type]  # the client only sleeps for it
                ping_interval=PING_S,
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
        await link.client.close()
        raise BrokerUnreachable(
            f"no nats-server with JetStream answers at {link.url} within {broker.connect_timeout_s} s: is nats-server "
            "running there? Omit broker.url to start an embedded one"
        ) from None
    except nats.errors.Error as error:
        await link.client.close()
        raise ConfigError(f"broker.url {link.url} cannot be used: {error}; write it as nats://HOST:PORT") from None
    except BaseException:
        await link.client.close()
        raise


def _credentials(broker: BrokerSection) -> dict[str, Any]:
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
