"""A nats-server with TLS and the users of two runs, as `horizonrl broker keys` makes them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from horizonrl.broker.access import Role
from horizonrl.broker.connect import connected
from horizonrl.broker.folder import Keys
from horizonrl.broker.keys import make_keys
from horizonrl.broker.nats_transport import NatsTransport
from horizonrl.broker.server import EmbeddedServer
from horizonrl.common.config import BrokerSection

RUN, OTHER = "mine", "other"
ACK_V2 = "feature_flags { js_ack_fc_v2: true }"


@dataclass(frozen=True)
class Secured:
    keys: Keys
    server: EmbeddedServer

    def settings(self, role: Role, run: str = RUN) -> BrokerSection:
        return BrokerSection(
            url=self.server.url, nkey_seed=self.keys.seed(run, role), ca_file=self.keys.authority, connect_timeout_s=5.0
        )

    @asynccontextmanager
    async def open(self, role: Role, run: str = RUN) -> AsyncIterator[NatsTransport]:
        async with connected(run, self.settings(role, run), role) as transport:
            yield transport


@asynccontextmanager
async def secured(directory: Path, extra: str = "") -> AsyncIterator[Secured]:
    """Hold a secured server open, with the streams of both runs on it."""
    make_keys(directory / "keys", [RUN, OTHER], ["nats.example"])
    keys = Keys(directory / "keys")
    async with EmbeddedServer(directory / "nats", extra=f"{keys.configuration.read_text()}\n{extra}") as server:
        broker = Secured(keys, server)
        for run in (RUN, OTHER):
            async with broker.open(Role.CONTROLLER, run):
                pass
        yield broker
