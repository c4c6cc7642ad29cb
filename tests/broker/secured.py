"""A nats-server with TLS and the users of two runs, as `horizonrl broker keys` makes them."""

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import nats
from nats.aio.client import Client

from horizonrl.broker.api import Role
from horizonrl.broker.nats.access import inbox
from horizonrl.broker.nats.connect import connect
from horizonrl.broker.nats.key_folder import KeyFolder, public_key
from horizonrl.broker.nats.keys import make_keys
from horizonrl.broker.nats.server import EmbeddedServer
from horizonrl.broker.nats.transport import NatsTransport
from horizonrl.common.config.nats import NatsSection
from horizonrl.common.config.schema import BrokerSection

RUN, OTHER = "mine", "other"
ACK_V2 = "feature_flags { js_ack_fc_v2: true }"


@dataclass(frozen=True)
class Secured:
    keys: KeyFolder
    server: EmbeddedServer

    def settings(self, role: Role, run: str = RUN, number: int = 0) -> BrokerSection:
        seed = self.keys.seed(run, role, number)
        nats = NatsSection(nkey_seed=seed, ca_file=self.keys.authority)
        return BrokerSection(url=self.server.url, nats=nats)

    @asynccontextmanager
    async def open(
        self, role: Role, run: str = RUN, number: int = 0
    ) -> AsyncIterator[NatsTransport]:
        transport = await connect(run, self.settings(role, run, number), role)
        try:
            yield transport
        finally:
            await transport.close()

    @asynccontextmanager
    async def client(
        self, role: Role, number: int = 0, errors: list[str] | None = None
    ) -> AsyncIterator[Client]:
        """Hold a bare client open, which may try anything; `errors` receives what the server refuses."""
        seed = self.keys.seed(RUN, role, number)

        async def hear(error: Exception) -> None:
            if errors is not None:
                errors.append(str(error))

        client = await nats.connect(
            self.server.url,
            nkeys_seed=str(seed),
            tls=ssl.create_default_context(cafile=self.keys.authority),
            allow_reconnect=False,
            inbox_prefix=inbox(RUN, role, public_key(seed)),
            error_cb=hear,
        )
        try:
            yield client
            await client.flush()  # the last refusal comes through its own callback
        finally:
            await client.close()


@asynccontextmanager
async def secured(directory: Path, extra: str = "") -> AsyncIterator[Secured]:
    """Hold a secured server open, with the streams of both runs and two actors of each on it."""
    make_keys(directory / "keys", [RUN, OTHER], ["nats.example"], actors=2)
    keys = KeyFolder(directory / "keys")
    included = keys.included(directory / "nats")
    async with EmbeddedServer(directory / "nats", extra=f"{included}\n{extra}") as server:
        broker = Secured(keys, server)
        for run in (RUN, OTHER):
            async with broker.open(Role.CONTROLLER, run):
                pass
        yield broker
