"""Open a run's transport on NATS: credentials, TLS, streams (`[broker.nats]`). Callers use `broker.connect`."""

import asyncio
import contextlib
import ssl
from pathlib import Path
from typing import Any

import nats.js.errors
import stamina

from horizonrl.broker.api import Role, Stream
from horizonrl.broker.nats.access import inbox
from horizonrl.broker.nats.connection import RECONNECT_WAIT_S, Connection
from horizonrl.broker.nats.key_folder import public_key
from horizonrl.broker.nats.replicas import until_replicated
from horizonrl.broker.nats.streams import ACTORS, bucket_name, ensure_streams, stream_name
from horizonrl.broker.nats.transport import NatsTransport
from horizonrl.common.config.nats import NatsSection
from horizonrl.common.config.schema import BrokerSection
from horizonrl.common.errors import BrokerUnreachable, ConfigError, RunUnknown
from horizonrl.common.logs import get_logger

log = get_logger()

CONNECT_S = 10.0
"""Seconds that a starting role waits for the broker."""
PING_S = 5
"""Seconds between two pings. A connection that died without a sign is noticed after two of them."""
STREAMS_WAIT_S = 120.0
"""A controller's pod has fetched its image and started within this time."""
STREAMS_POLL_S = 0.5
ELECTION_S = 60.0
"""A cluster that has just been started, or has lost a leader, makes no streams before it has elected one."""
PENDING_BYTES = 128 << 20
"""Above this, the client waits inside a publish, where nats-py 2.16 swallows a cancellation."""


async def connect(
    run: str,
    broker: BrokerSection,
    role: Role = Role.CONTROLLER,
    existing: bool = False,
    wait_s: float | None = None,
) -> NatsTransport:
    """Connect to `broker.url` as a role; the controller creates the run's streams, the other roles wait for them.

    With `existing`, no role creates streams or waits for them: this raises RunUnknown if there are none of the run.
    Raises BrokerUnreachable after `wait_s`, BrokerDenied for wrong credentials and certificates, ConfigError for a file
    of `[broker.nats]` that cannot be used. The connection then survives any number of server restarts.
    """
    wait_s = CONNECT_S if wait_s is None else wait_s
    servers, creates = broker.servers, role is Role.CONTROLLER and not existing
    credentials = _credentials(broker.nats)
    # Connection logs long waits; stamina's hook would warn of each retry.
    stamina.instrumentation.set_on_retry_hooks([])
    connection = Connection(
        ",".join(servers), encrypted=broker.nats.ca_file is not None, domain=broker.nats.domain
    )
    try:
        async with asyncio.timeout(wait_s) as patience:
            await connection.client.connect(
                servers,
                name=f"horizonrl {run}",
                # For ever: a role outlives any restart of the server, and each call has a deadline of its own.
                max_reconnect_attempts=-1,
                reconnect_time_wait=RECONNECT_WAIT_S,  # type: ignore[arg-type]  # the client only sleeps for it
                ping_interval=PING_S,
                pending_size=PENDING_BYTES,
                error_cb=connection.on_error,
                disconnected_cb=connection.on_disconnected,
                reconnected_cb=connection.on_reconnected,
                closed_cb=connection.on_closed,
                reconnect_to_server_handler=connection.next_server,
                # A user may subscribe to no other inbox, so that no actor hears the answers of another (threat model).
                inbox_prefix=inbox(run, role, _user(broker.nats)),
                **credentials,
            )
            # Before the first `ask`, which waits for it.
            connection.opened()
            # One role creates the streams: the others lack the permission, and need not agree on the settings.
            if creates:
                _refuse_unheard_durability(connection, broker.nats)
                if connection.clustered:
                    patience.reschedule(asyncio.get_running_loop().time() + ELECTION_S)
                js = connection.jetstream()
                await connection.ask(lambda: ensure_streams(js, run, broker), deadline_s=None)
        if creates and connection.clustered:
            await until_replicated(connection, run)
        if creates:
            return NatsTransport(connection, run, broker.ack_wait_s)
        if role is Role.MONITOR:  # a person who waits at `horizonrl status`
            patience_s = wait_s
        elif existing:
            patience_s = ELECTION_S if connection.clustered else wait_s
        else:  # the others may start long before the controller
            patience_s = STREAMS_WAIT_S
        ack_wait_s = await _await_streams(connection, run, patience_s, existing)
        if broker.nats.domain is not None:
            await _find_mirror(connection, stream_name(run, Stream.WEIGHTS))
        return NatsTransport(connection, run, ack_wait_s)
    except TimeoutError:
        leaderless = creates and connection.clustered
        await connection.close()
        connection.raise_refusal()
        if leaderless:
            raise _leaderless(connection, ELECTION_S) from None
        raise BrokerUnreachable(
            f"no nats-server with JetStream answers at {connection.url} within {wait_s:g} s: does it "
            "run, and is the address right? `horizonrl broker RECIPE` starts one, and `train` without broker.url too"
        ) from None
    except BaseException:
        await connection.close()
        raise


async def _await_streams(
    connection: Connection, run: str, patience_s: float, existing: bool
) -> float:
    """Wait until the controller has created the run's streams; return the `ack_wait_s` that it has set.

    Before there are streams, nothing can wake a waiter, so it polls. With `existing`, it raises RunUnknown.
    """
    js, answered = connection.jetstream(), False
    try:
        async with asyncio.timeout(patience_s):
            while True:
                with contextlib.suppress(nats.js.errors.NotFoundError):
                    # The last one that is created.
                    await connection.ask(lambda: js.stream_info(f"KV_{bucket_name(run)}"))
                    consumer = await connection.ask(
                        lambda: js.consumer_info(stream_name(run, Stream.TICKETS), ACTORS)
                    )
                    # What the server enforces and not what this role's recipe says: the heartbeat has to match it.
                    return float(consumer.config.ack_wait or 0.0)
                answered = True
                if existing:
                    raise RunUnknown(f"{connection.url} has no streams of run {run}")
                log.info("streams_awaited", run=run)
                await asyncio.sleep(STREAMS_POLL_S)
    except TimeoutError:
        if not answered and connection.clustered:
            raise _leaderless(connection, patience_s) from None
        raise BrokerUnreachable(
            f"{connection.url} has no streams of run {run} after {patience_s:g} s: start its controller, which creates "
            "them, or check run.name"
        ) from None


def _leaderless(connection: Connection, waited_s: float) -> BrokerUnreachable:
    return BrokerUnreachable(
        f"the cluster of {connection.url} has elected no leader of its streams for {waited_s:g} s: do most of its "
        "servers run, and do they reach each other? Their logs name the leader that they have elected, or none"
    )


async def _find_mirror(connection: Connection, stream: str) -> None:
    """Read a stream from its mirror in the domain of the server that the client is connected to, if it has one."""
    here = connection.client.jetstream()
    with contextlib.suppress(nats.js.errors.NotFoundError, nats.js.errors.ServiceUnavailableError):
        if (await here.stream_info(stream)).config.mirror is not None:
            connection.mirrored = stream
    log.info(
        "leaf_node",
        domain=connection.domain,
        weights="its mirror" if connection.mirrored else "the broker",
    )


def _refuse_unheard_durability(connection: Connection, section: NatsSection) -> None:
    """Raise ConfigError if `durability` asks for what the server was never told: only a server of our own reads it."""
    # With an HTTP client, which an actor need not wait for.
    from horizonrl.broker.nats.server import STANDALONE

    name = connection.server_name
    if section.durability == "power" and not name.startswith(STANDALONE):
        raise ConfigError(
            f"broker.nats.durability is power, but HorizonRL did not start the nats-server {name} at {connection.url}, "
            "which does not read this key and tells no client how it writes: put `sync_interval: always` into the "
            "section `jetstream` of its configuration, and leave the key out"
        )


def _credentials(section: NatsSection) -> dict[str, Any]:
    """Return the arguments that authenticate the client. Raises ConfigError for a file that cannot be used."""
    for name in ("nkey_seed", "ca_file"):
        path: Path | None = getattr(section, name)
        if path is not None and not path.is_file():
            raise ConfigError(f"broker.nats.{name} is {path}: there is no such file")
    secret = section.password
    options: dict[str, Any] = {
        "user": section.user,
        "password": None if secret is None else secret.get_secret_value(),
    }
    if section.nkey_seed is not None:
        kind = "user_credentials" if _holds_jwt(section.nkey_seed) else "nkeys_seed"
        options[kind] = str(section.nkey_seed)
    if section.ca_file is not None:
        try:
            options["tls"] = ssl.create_default_context(cafile=str(section.ca_file))
        except ssl.SSLError:
            raise ConfigError(
                f"broker.nats.ca_file is {section.ca_file}: it holds no certificate"
            ) from None
    return options


def _holds_jwt(seed: Path) -> bool:
    return b"-----BEGIN NATS USER JWT-----" in seed.read_bytes()


def _user(section: NatsSection) -> str:
    """Return the public nkey of `nkey_seed`, or "" without one. Raises ConfigError for a file that holds no seed."""
    if section.nkey_seed is None or _holds_jwt(section.nkey_seed):
        return ""
    try:
        return public_key(section.nkey_seed)
    except ValueError:
        raise ConfigError(
            f"broker.nats.nkey_seed is {section.nkey_seed}: it holds no nkey seed; make one with "
            "`horizonrl broker keys`"
        ) from None
