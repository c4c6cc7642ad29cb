"""`horizonrl bench broker`: the cost of `broker.nats.durability = "power"` against `"process"`, measured side by side.

With both, an acknowledged message survives a killed server. With "power" the server also fsyncs every write.
"""

import asyncio
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
from horizonrl.broker.nats.server import EmbeddedServer
from horizonrl.common.config.schema import BrokerSection
from horizonrl.ops.cli.terminal import plain_console

SIZES = {"ticket": 300, "group": 40_000, "frame chunk": 2 << 20}
"""Sizes of the published messages in bytes: a ticket, a group of 8 short episodes, a chunk of weights."""
AT_ONCE = 8
ROUND_BYTES = 32 << 20
ROUND_MESSAGES = 400
ROUNDS = 5

Durability = Literal["process", "power"]


def run(json_file: Path | None = None) -> int:
    """Publish with both settings in turns; print messages per second and their ratio."""
    rates = uvloop.run(_measure())
    table = Table("message", "bytes", "process /s", "power /s", "power costs", title="durability")
    report: dict[str, Any] = {}
    for name, size in SIZES.items():
        process, power = (statistics.median(rates[kind, name]) for kind in ("process", "power"))
        report[name] = {"bytes": size, "process_per_s": process, "power_per_s": power, "ratio": process / power}
        table.add_row(name, str(size), f"{process:.0f}", f"{power:.0f}", f"{process / power:.1f} x")
    plain_console().print(table)
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=2) + "\n")
    return 0


async def _measure() -> dict[tuple[Durability, str], list[float]]:
    rates: dict[tuple[Durability, str], list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="horizonrl-bench-") as directory:
        async with (
            EmbeddedServer(Path(directory) / "process", "process") as process,
            EmbeddedServer(Path(directory) / "power", "power") as power,
        ):
            # In turns, so that other load on the machine hits both servers alike. The median leaves out the worst
            # rounds.
            for turn in range(ROUNDS):
                for kind, server in (("process", process), ("power", power)):
                    for name, size in SIZES.items():
                        rate = await _publish(server, f"{name} {turn}", size)
                        rates.setdefault((kind, name), []).append(rate)  # type: ignore[arg-type]
    return rates


async def _publish(server: EmbeddedServer, name: str, size: int) -> float:
    """Return messages per second with AT_ONCE messages in flight, each confirmed."""
    count = min(ROUND_MESSAGES, max(1, ROUND_BYTES // size))
    payload, left = os.urandom(size), iter(range(count))
    async with connected("bench", BrokerSection(url=server.url)) as transport:

        async def publish() -> None:
            for number in left:
                # A new id each time: the server would drop a repeated one without storing it.
                await transport.publish("groups.train", payload, message_id=f"{name} {number}")

        started = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(publish())
        return count / (time.monotonic() - started)
