"""Open a run's transport: the scheme of `broker.url` chooses which one.

This is the only door to a broker for actors, learner and ops. To add a transport, write a module with a function
`connect(run, broker, role, existing, wait_s)` that returns a `Transport`, and list its scheme below. The contract suite
runs every scheme.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib import import_module
from urllib.parse import urlsplit

from horizonrl.broker.api import Role, Transport
from horizonrl.common.config.schema import BrokerSection
from horizonrl.common.errors import ConfigError

Connect = Callable[[str, BrokerSection, Role, bool, float | None], Awaitable[Transport]]

TRANSPORTS = {
    "nats": "horizonrl.broker.nats.connect:connect",
    "tls": "horizonrl.broker.nats.connect:connect",
    "ws": "horizonrl.broker.nats.connect:connect",
    "wss": "horizonrl.broker.nats.connect:connect",
    "memory": "horizonrl.broker.memory:connect",
}
"""By scheme, the function that connects, as `module:function`. A module is imported when its scheme is used: the NATS
client takes half a second, which `horizonrl --help` should not."""


async def connect(
    run: str,
    broker: BrokerSection,
    role: Role = Role.CONTROLLER,
    *,
    existing: bool = False,
    wait_s: float | None = None,
) -> Transport:
    """Connect to `broker.url` as a role. The controller creates the run's streams; the other roles wait for them.

    With `existing`, no role creates streams or waits for them: without streams of the run, this raises RunUnknown.
    Raises ConfigError for a url that no transport serves, BrokerUnreachable if no broker answers within `wait_s`, and
    BrokerDenied if it refuses the credentials. Once open, the transport survives any number of broker restarts.
    """
    opened: Connect = _find(broker)
    return await opened(run, broker, role, existing, wait_s)


@asynccontextmanager
async def connected(
    run: str,
    broker: BrokerSection,
    role: Role = Role.CONTROLLER,
    *,
    existing: bool = False,
    wait_s: float | None = None,
) -> AsyncIterator[Transport]:
    """Hold a run's transport open while the body runs (see `connect`)."""
    transport = await connect(run, broker, role, existing=existing, wait_s=wait_s)
    try:
        yield transport
    finally:
        await transport.close()


def _find(broker: BrokerSection) -> Connect:
    if broker.url is None:
        raise ConfigError(
            "broker.url is none: write it as nats://HOST:PORT, or tls://HOST:PORT for TLS"
        )
    # The servers of a cluster are one broker: two transports could not share its leases.
    schemes = {urlsplit(server).scheme for server in broker.servers}
    modules = {TRANSPORTS.get(scheme) for scheme in schemes}
    if len(modules) != 1 or None in modules:
        raise ConfigError(
            f"broker.url is {broker.url}: no single transport serves {', '.join(sorted(schemes))}; the schemes are "
            f"{', '.join(TRANSPORTS)}"
        )
    module, _, function = str(modules.pop()).partition(":")
    connect: Connect = getattr(import_module(module), function)
    return connect
