"""Every transport under one fixture: what holds for one has to hold for the others."""

import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from horizonrl.broker.api import Role, Transport
from horizonrl.broker.connect import TRANSPORTS, connected
from horizonrl.common.config.schema import BrokerSection

URLS: dict[str, Callable[[pytest.FixtureRequest], str]] = {
    "nats": lambda request: str(request.getfixturevalue("nats_server").url),
}
"""By transport, where a test finds its server. A transport that has none gets a url of its own per test."""
SERVED = {TRANSPORTS[name] for name in URLS}
IN_PROCESS = [scheme for scheme, function in TRANSPORTS.items() if function not in SERVED]


@dataclass
class Broker:
    """`async with broker.open() as transport`; every transport of one test is on the same run."""

    url: str
    run: str = field(default_factory=lambda: f"t-{uuid.uuid4().hex[:8]}")

    @asynccontextmanager
    async def open(
        self, ack_wait_s: float = 30.0, max_log_bytes: int = 1 << 26, role: Role = Role.CONTROLLER
    ) -> AsyncIterator[Transport]:
        settings = BrokerSection(url=self.url, ack_wait_s=ack_wait_s, max_log_bytes=max_log_bytes)
        async with connected(self.run, settings, role) as transport:
            yield transport


PARAMETERS = [*IN_PROCESS, *(pytest.param(name, marks=pytest.mark.process) for name in URLS)]


@pytest.fixture(params=PARAMETERS)
def broker(request: pytest.FixtureRequest) -> Broker:
    find = URLS.get(request.param, lambda _: f"{request.param}://{uuid.uuid4().hex}")
    return Broker(find(request))


async def fill(
    transport: Transport, count: int, subject: str = "groups.train", prefix: str = "m"
) -> None:
    for index in range(count):
        await transport.publish(subject, b"%d" % index, message_id=f"{prefix}-{index}")
