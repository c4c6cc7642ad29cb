"""The broker under test: one nats-server or a cluster, each server behind proxies that can cut it off.

Place in the flow: the roles reach each server through a proxy of its own, and the servers of a cluster reach one
another through a proxy per direction. So one server can be cut off from the others, from its clients, or from both.
"""

import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from horizonrl.broker.nats.cluster import EmbeddedCluster, free_ports
from horizonrl.broker.nats.server import EmbeddedServer
from tests.faults.proxy import Proxy

# Neither clients nor servers may learn of an address that is not a proxy's; nobody listens on port 1.
HIDDEN = 'no_advertise: true\n  advertise: "127.0.0.1:1"'


@dataclass
class Servers:
    members: list[EmbeddedServer]
    clients: list[Proxy]
    """By server, the proxy through which clients reach it."""
    routes: dict[tuple[int, int], Proxy] = field(default_factory=dict)
    """By (i, j), the proxy through which server i reaches server j."""

    @property
    def url(self) -> str:
        """The broker's address through the proxies."""
        return ",".join(proxy.url for proxy in self.clients)

    @property
    def direct_url(self) -> str:
        """The broker's address past the proxies."""
        return ",".join(server.url for server in self.members)

    def number(self, name: str) -> int:
        """Return the number of the server with a name, such as the leader of a stream."""
        return next(number for number, server in enumerate(self.members) if server.name == name)

    def lines(self, number: int, *, with_clients: bool) -> Iterator[Proxy]:
        """Yield the proxies of one server: those to the other servers, and perhaps the one of its clients."""
        if with_clients:
            yield self.clients[number]
        yield from (proxy for pair, proxy in self.routes.items() if number in pair)


@contextlib.asynccontextmanager
async def serving(directory: Path, count: int) -> AsyncIterator[Servers]:
    """Run `count` nats-servers in `directory` while the body runs."""
    async with contextlib.AsyncExitStack() as stack:
        if count == 1:
            server = await stack.enter_async_context(EmbeddedServer(directory))
            yield Servers([server], [await stack.enter_async_context(Proxy(server.port or 0))])
            return
        cluster = EmbeddedCluster(directory, addresses=[("127.0.0.1", None)] * count)
        cluster.route_ports = free_ports(count)
        routes: dict[tuple[int, int], Proxy] = {}
        for pair in [(i, j) for i in range(count) for j in range(count) if i != j]:
            routes[pair] = await stack.enter_async_context(Proxy(cluster.route_ports[pair[1]]))
        cluster.join(
            [[routes[i, j].port for j in range(count) if i != j] for i in range(count)], HIDDEN
        )
        await cluster.launch()
        stack.push_async_callback(cluster.stop)
        clients = [
            await stack.enter_async_context(Proxy(server.port or 0)) for server in cluster.servers
        ]
        yield Servers(cluster.servers, clients, routes)
