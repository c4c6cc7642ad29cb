"""`horizonrl bench broker`: the cost of `broker.nats.durability` and `broker.nats.replicas`, measured side by side.

With every combination, an acknowledged message survives a killed server. With "power" a server also fsyncs every write;
with 3 replicas, a message is confirmed when two of three servers have it.
"""

import asyncio
import contextlib
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import uvloop
from rich.table import Table

from horizonrl.broker.connect import connected
from horizonrl.broker.nats.cluster import EmbeddedCluster
from horizonrl.broker.nats.server import EmbeddedServer
from horizonrl.common.config.nats import NatsSection
from horizonrl.common.config.schema import BrokerSection
from horizonrl.ops.terminal.console import plain_console

SIZES = {"ticket": 300, "group": 40_000, "frame chunk": 2 << 20}
"""Sizes of the published messages in bytes: a ticket, a group of 8 short episodes, a chunk of weights."""
AT_ONCE = 8
ROUND_BYTES = 32 << 20
ROUND_MESSAGES = 400
ROUNDS = 5

Durability = Literal["process", "power"]
Kind = tuple[Durability, int]
"""Durability and replicas."""
KINDS: tuple[Kind, ...] = (("process", 1), ("power", 1), ("process", 3), ("power", 3))


def run(json_file: Path | None = None) -> int:
    """Publish with every setting in turns; print messages per second, and the ratio to the first setting."""
    rates = uvloop.run(_measure())
    headings = [f"{durability} R{replicas} /s" for durability, replicas in KINDS]
    table = Table("message", "bytes", *headings, "power costs", "R3 costs", title="durability")
    report: dict[str, Any] = {}
    for name, size in SIZES.items():
        process, power, process_r3, power_r3 = (statistics.median(rates[kind, name]) for kind in KINDS)
        spread = {
            f"{durability}_r{replicas}": [fold(rates[(durability, replicas), name]) for fold in (min, max)]
            for durability, replicas in KINDS
        }
        report[name] = {
            "bytes": size,
            "process_per_s": process,
            "power_per_s": power,
            "ratio": process / power,
            "process_r3_per_s": process_r3,
            "power_r3_per_s": power_r3,
            "replicas_ratio": process / process_r3,
            "power_replicas_ratio": power / power_r3,
            "spread": spread,
        }
        shown = [f"{rate:.0f}" for rate in (process, power, process_r3, power_r3)]
        table.add_row(name, str(size), *shown, f"{process / power:.1f} x", f"{process / process_r3:.1f} x")
    plain_console().print(table)
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


async def _measure() -> dict[tuple[Kind, str], list[float]]:
    rates: dict[tuple[Kind, str], list[float]] = {}
    async with contextlib.AsyncExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="horizonrl-bench-")))
        servers: dict[Kind, EmbeddedServer | EmbeddedCluster] = {}
        for durability, replicas in KINDS:
            folder = place / f"{durability}-{replicas}"
            single, several = EmbeddedServer(folder, durability), EmbeddedCluster(folder, durability)
            servers[durability, replicas] = await stack.enter_async_context(several if replicas > 1 else single)
        # In turns, so that other load on the machine hits all servers alike. The median leaves out the worst rounds.
        for turn in range(ROUNDS):
            for kind, server in servers.items():
                broker = BrokerSection(url=server.url, nats=NatsSection(replicas=kind[1]))
                for name, size in SIZES.items():
                    rates.setdefault((kind, name), []).append(await _publish(broker, f"{name} {turn}", size))
    return rates


async def _publish(broker: BrokerSection, name: str, size: int) -> float:
    """Return messages per second with AT_ONCE messages in flight, each confirmed."""
    count = min(ROUND_MESSAGES, max(1, ROUND_BYTES // size))
    payload, left = os.urandom(size), iter(range(count))
    async with connected("bench", broker) as transport:

        async def publish() -> None:
            for number in left:
                # A new id each time: the server would drop a repeated one without storing it.
                await transport.publish("groups.train", payload, message_id=f"{name} {number}")

        started = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(publish())
        return count / (time.monotonic() - started)
