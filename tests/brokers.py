"""Both transports under one fixture: what holds for one has to hold for the other."""

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from horizonrl.broker.api import Transport
from horizonrl.broker.memory import MemoryServer, MemoryTransport
from horizonrl.broker.nats.connect import connect
from horizonrl.common.config.schema import BrokerSection


@dataclass
class Broker:
    """`async with broker.open() as transport`; every transport of one test is on the same run."""

    url: str | None
    """None is the broker in memory."""
    run: str = field(default_factory=lambda: f"t-{uuid.uuid4().hex[:8]}")
    _memory: MemoryServer | None = None

    @asynccontextmanager
    async def open(self, ack_wait_s: float = 30.0, max_log_bytes: int = 1 << 26) -> AsyncIterator[Transport]:
        transport: Transport
        if self.url is None:
            self._memory = self._memory or MemoryServer(ack_wait_s=ack_wait_s, max_log_bytes=max_log_bytes)
            transport = MemoryTransport(self._memory, self.run)
        else:
            settings = BrokerSection(url=self.url, ack_wait_s=ack_wait_s, max_log_bytes=max_log_bytes)
            transport = await connect(self.run, settings)
        try:
            yield transport
        finally:
            await transport.close()


@pytest.fixture(params=["memory", pytest.param("nats", marks=pytest.mark.process)])
def broker(request: pytest.FixtureRequest) -> Broker:
    return Broker(None if request.param == "memory" else request.getfixturevalue("nats_server").url)
