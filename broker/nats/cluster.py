"""A cluster of nats-servers on this machine: one broker that survives the loss of any minority of its servers.

For a single machine it protects from a server that crashes or hangs, not from the machine's end. Its main use is to
try, before a run spans several machines, what such a run will do. See docs/reliability.md, "A cluster".
"""

import asyncio
import contextlib
import random
import secrets
import socket
import time
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Literal, Self

import aiohttp

from horizonrl.broker.nats.server import LOG_FILE, EmbeddedServer
from horizonrl.common.errors import BrokerUnreachable, RunFailed
from horizonrl.common.restarts import Restarts

READY_S = 60.0
READY_POLL_S = 0.1
SHORT_LIFE_S = 30.0
"""A server that ends sooner than this after its start counts as failing again."""
ROUTE_PORTS = (20_000, 32_000)
ANYWHERE = (("127.0.0.1", None),) * 3
"""Three servers on free ports of loopback."""

# Routes are open on loopback only, and need the password: a route may do anything on every account.
CLUSTER = """\
cluster {{
  name: horizonrl
  listen: "127.0.0.1:{port}"
  authorization {{ user: route, password: "{password}" }}
  routes: [{routes}]
  {more}
}}
"""


class EmbeddedCluster:
    """`async with EmbeddedCluster(directory) as cluster: cluster.url`."""

    def __init__(
        self,
        directory: Path,
        durability: Literal["process", "power"] = "process",
        *,
        addresses: Sequence[tuple[str, int | None]] = ANYWHERE,
        extra: str = "",
    ) -> None:
        """`addresses` are host and port of each server for clients; a port of None is a free one."""
        self._extra = extra
        self._password = secrets.token_hex(16)
        self.servers = [
            # A name for good: the servers know one another by it, also after a restart.
            EmbeddedServer(
                member_folder(directory, number),
                durability,
                host=host,
                port=port,
                name=f"horizonrl-{number}",
            )
            for number, (host, port) in enumerate(addresses)
        ]
        self.route_ports: list[int] = []

    @property
    def url(self) -> str:
        """The urls of all servers, as `broker.url` takes them."""
        return ",".join(server.url for server in self.servers)

    def join(self, dialled: Sequence[Sequence[int]] | None = None, more: str = "") -> None:
        """Give each server its place in the cluster. `dialled[i]` are the ports at which server i finds the others."""
        # Chosen before any server starts, since each has to know where the others will be.
        self.route_ports = self.route_ports or free_ports(len(self.servers))
        for number, (server, route_port) in enumerate(
            zip(self.servers, self.route_ports, strict=True)
        ):
            others = (
                dialled[number]
                if dialled
                else [port for port in self.route_ports if port != route_port]
            )
            routes = ", ".join(
                f'"nats://route:{self._password}@127.0.0.1:{port}"' for port in others
            )
            cluster = CLUSTER.format(
                port=route_port, password=self._password, routes=routes, more=more
            )
            server.extra = f"{self._extra}\n{cluster}"

    async def start(self) -> None:
        """Start every server and return once they have elected a leader. Raises BrokerUnreachable."""
        self.join()
        await self.launch()

    async def launch(self) -> None:
        """Start every server as `join` has placed it; see `start`."""
        try:
            # All at once: a server that is alone waits for the others.
            await asyncio.gather(*(server.start() for server in self.servers))
            async with asyncio.timeout(READY_S):
                while not all([await _ready(server) for server in self.servers]):  # noqa: ASYNC110 - nobody tells
                    await asyncio.sleep(READY_POLL_S)
        except BaseException as error:
            await self.stop()
            if not isinstance(error, TimeoutError):
                raise
            raise BrokerUnreachable(
                f"{len(self.servers)} nats-servers have elected no leader within {READY_S:g} s; see "
                f"{self.servers[0].directory / 'nats-server.log'}"
            ) from None

    async def supervise(self) -> None:
        """Start each server again whenever it ends, for ever. Raises RunFailed for one that keeps ending."""
        async with asyncio.TaskGroup() as group:
            for server in self.servers:
                group.create_task(_keep(server))
                group.create_task(server.end_when_curable())

    def reload(self) -> None:
        for server in self.servers:
            server.reload()

    async def stop(self) -> None:
        """End every server cleanly."""
        # All at once: one that is alone waits for the others before it ends.
        await asyncio.gather(*(server.stop() for server in self.servers))

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()


async def _keep(server: EmbeddedServer) -> None:
    restarts, long_lives = Restarts(server.name, server.directory / LOG_FILE), 0
    while True:
        began = time.monotonic()
        code = await server.wait()
        long_lives += time.monotonic() - began >= SHORT_LIFE_S
        await restarts.wait(code, long_lives)
        await server.restart()


async def _ready(server: EmbeddedServer) -> bool:
    """Return whether a server knows the leader of its cluster."""
    with contextlib.suppress(aiohttp.ClientError, TimeoutError):
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as session,
            session.get(f"{server.monitoring}/healthz") as answer,
        ):
            return answer.status == HTTPStatus.OK
    return False


def member_folder(directory: Path, number: int) -> Path:
    """Return the folder of one server of the cluster in `directory`."""
    return directory / f"server-{number}"


def free_ports(count: int) -> list[int]:
    """Return ports of loopback that are free now, all different."""
    numbers: list[int] = []
    # Below the ports that Linux gives to whoever asks for any: between this look and the server's start, a connection
    # or another server would take one of those.
    for port in random.sample(range(*ROUTE_PORTS), ROUTE_PORTS[1] - ROUTE_PORTS[0]):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            numbers.append(port)
        if len(numbers) == count:
            return numbers
    raise RunFailed(
        f"no {count} ports of loopback between {ROUTE_PORTS[0]} and {ROUTE_PORTS[1]} are free"
    )
