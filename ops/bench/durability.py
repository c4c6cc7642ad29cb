"""The cost of `broker.nats.durability` and `broker.nats.replicas`, measured side by side.

With every combination, an acknowledged message survives a killed server. With "power" a server also fsyncs every write;
with 3 replicas, a message is confirmed when two of three servers have it.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack
from functools import partial
from itertools import count, islice
from typing import Literal

from horizonrl.broker.connect import connected
from horizonrl.broker.nats.cluster import EmbeddedCluster
from horizonrl.broker.nats.server import EmbeddedServer
from horizonrl.common.config.nats import NatsSection
from horizonrl.common.config.schema import BrokerSection
from horizonrl.ops.bench.case import Case, Request, rate

SIZES = {"ticket": 300, "group": 40_000, "frame chunk": 2 << 20}
"""Sizes of the published messages in bytes: a ticket, a group of 8 short episodes, a chunk of weights."""
AT_ONCE = 8
ROUND_BYTES = 32 << 20
ROUND_MESSAGES, SMALL_ROUND_MESSAGES = 400, 4

Durability = Literal["process", "power"]
SETTINGS: tuple[tuple[Durability, int], ...] = (
    ("process", 1), ("power", 1), ("process", 3), ("power", 3),
)  # fmt: skip
"""Durability and replicas; the first is the default."""


async def cases(request: Request) -> AsyncIterator[Case]:
    """Yield a case per size of message, in which every setting publishes in turns."""
    numbers = count()
    async with AsyncExitStack() as stack:
        brokers: dict[str, BrokerSection] = {}
        for durability, replicas in SETTINGS:
            folder = request.scratch / f"{durability}-{replicas}"
            server: EmbeddedCluster | EmbeddedServer
            if replicas > 1:
                server = await stack.enter_async_context(EmbeddedCluster(folder, durability))
            else:
                server = await stack.enter_async_context(EmbeddedServer(folder, durability))
            nats = NatsSection(replicas=replicas)
            brokers[f"{durability}, R{replicas}"] = BrokerSection(url=server.url, nats=nats)
        most = SMALL_ROUND_MESSAGES if request.small else ROUND_MESSAGES
        for name, size in SIZES.items():
            messages = min(most, max(1, ROUND_BYTES // size))
            sides = {
                setting: partial(_publish, broker, numbers, messages, os.urandom(size))
                for setting, broker in brokers.items()
            }
            yield Case(f"{name} of {size:,} bytes, {next(iter(sides))}", sides)


async def _publish(
    broker: BrokerSection, numbers: Iterator[int], messages: int, payload: bytes
) -> Mapping[str, float]:
    """Publish with AT_ONCE messages in flight, each confirmed."""
    remaining = islice(numbers, messages)
    async with connected("bench", broker) as transport:

        async def publish() -> None:
            for number in remaining:
                # A new id each time: the server would drop a repeated one without storing it.
                await transport.publish("groups.train", payload, message_id=str(number))

        return await rate(
            "messages/s", messages, lambda: asyncio.gather(*(publish() for _ in range(AT_ONCE)))
        )()
