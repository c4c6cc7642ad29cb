"""`horizonrl bench scale`: messages, bytes and CPU time per group as actors are added, and what an idle actor costs.

Each row is a run of its own with as many groups per step as actors, so that every actor plays one group per version on
average and the credit keeps all of them busy.
"""

import asyncio
import contextlib
import json
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import uvloop
from rich.table import Table

from horizonrl.broker.api import Key, Stream, Transport
from horizonrl.broker.connect import connected
from horizonrl.broker.nats.server import EmbeddedServer
from horizonrl.broker.state import StateStore
from horizonrl.common.children import bound
from horizonrl.common.config.schema import RunConfig
from horizonrl.common.errors import RunFailed
from horizonrl.common.state import Progress
from horizonrl.ops.bench.faults.cluster import make_model
from horizonrl.ops.bench.scale.light_actors import READY
from horizonrl.ops.bench.scale.long_run import OUTSTANDING, bookkeeping_s, restart
from horizonrl.ops.cli.terminal import plain_console
from horizonrl.ops.cli.waiting import waiting
from horizonrl.ops.run.logfiles import last_lines

RECIPE = """\
[run]
name = "scale"
root = "{directory}"

[model]
name = "{model}"
max_context_tokens = 256

[[envs]]
id = "parity"

[rollout]
group_size = 2
max_turn_tokens = 4

[horizon]
horizons = [4]

[imitation]
steps = 0

[rl]
steps = 1000000
groups_per_step = {groups_per_step}
max_staleness = 2

[learner]
backend = "hash"
checkpoint_every = 10

[actor]
engine = "scripted"
slots = 2
drain_s = 1
"""
ROWS = (1, 10, 100, 1_000, 5_000)
SMALL_ROWS = (1, 20)
LEAST_GROUPS_PER_STEP = 10
BOOKKEEPING = (500, 1_000, 2_000, 4_000)
"""Groups of the steps whose bookkeeping is measured."""
LONG = 10_000_000
"""Tickets of the run that is started again."""
PER_PROCESS = 2_500
"""Light actors of one process."""
SECONDS, SMALL_SECONDS = 30.0, 2.0
STEPS = 2
"""A row is measured over whole steps, at least so many of them, because part of the cost comes once per step."""
IDLE_FROM = 100
"""Fewer actors send too few messages in IDLE_S to count them."""
IDLE_S = 70.0
"""Twice the mean time after which an idle actor asks again."""
START_S = 300.0
POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class ScaleRow:
    actors: int
    groups_per_s: float
    messages_per_group: float
    """In and out of the server, acknowledgements included."""
    bytes_per_group: float
    cpu_ms_per_group: float
    """Of server, controller and learner."""
    server_ms_per_group: float
    controller_ms_per_group: float
    learner_ms_per_group: float
    actors_ms_per_group: float
    groups: int
    seconds: float
    memory_mib: dict[str, float]
    idle_messages_per_s: float | None = None
    """Of one actor. None where it was not measured."""


@dataclass(frozen=True, slots=True)
class Reading:
    at: float
    step: int
    groups: int
    messages: int
    bytes: int
    cpu_s: dict[str, float]


@dataclass
class ScaledRun:
    server: EmbeddedServer
    transport: Transport
    roles: dict[str, list[psutil.Process]]

    async def sample(self) -> Reading:
        figures = await self.server.figures()
        return Reading(
            at=time.monotonic(),
            step=await self.step(),
            groups=(await self.transport.extent(Stream.GROUPS)).last_sequence,
            messages=figures["in_msgs"] + figures["out_msgs"],
            bytes=figures["in_bytes"] + figures["out_bytes"],
            cpu_s={role: sum(map(_cpu_s, processes)) for role, processes in self.roles.items()},
        )

    async def step(self) -> int:
        progress = await StateStore(self.transport).get(Key.PROGRESS)
        return progress.step if isinstance(progress, Progress) else 0

    async def until_step(self, step: int, limit_s: float) -> None:
        """Wait for a step, looking seldom enough not to be measured. Raises RunFailed if it does not come in time."""
        deadline = time.monotonic() + limit_s
        while await self.step() < step:
            if time.monotonic() > deadline:
                raise RunFailed(
                    f"step {step} did not come within {limit_s:g} s; see the logs of {self.server.directory}"
                )
            await asyncio.sleep(POLL_S)


def run(actors: Sequence[int], small: bool, json_file: Path | None) -> int:
    """Measure each number of actors in turn and print a table."""
    _raise_descriptors()
    table = Table(
        "actors", "groups/s", "messages", "bytes", "CPU ms", "server", "controller", "learner", "actors'", "idle msg/s",
        title="per settled group",
    )  # fmt: skip
    rows: list[ScaleRow] = []
    with tempfile.TemporaryDirectory(prefix="horizonrl-scale-") as directory:
        asyncio.run(_make_model(Path(directory)))
        for count in actors or (SMALL_ROWS if small else ROWS):
            with waiting(plain_console(stderr=True), f"measuring {count:,} actors", announced=True):
                row = uvloop.run(_measure(Path(directory), count, small))
            rows.append(row)
            idle = "" if row.idle_messages_per_s is None else f"{row.idle_messages_per_s:.3f}"
            numbers = (
                row.cpu_ms_per_group, row.server_ms_per_group, row.controller_ms_per_group, row.learner_ms_per_group,
                row.actors_ms_per_group,
            )  # fmt: skip
            table.add_row(
                f"{count:,}", f"{row.groups_per_s:.0f}", f"{row.messages_per_group:.1f}",
                f"{row.bytes_per_group:,.0f}", *(f"{number:.2f}" for number in numbers), idle,
            )  # fmt: skip
        report: dict[str, Any] = {"cores": os.cpu_count(), "rows": [asdict(row) for row in rows]}
        if not actors:  # what does not depend on their number
            with waiting(plain_console(stderr=True), "measuring a large step and a long run", announced=True):
                report |= _long(Path(directory) / "long", small)
    console = plain_console()
    console.print(table)
    for line in _told(report):
        console.print(line)
    if (growth := _growth(rows)) is not None:
        console.print(f"CPU per group from {rows[growth[0]].actors:,} to {rows[-1].actors:,} actors: {growth[1]:.2f} x")
        report["cpu_growth"] = growth[1]
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def _long(directory: Path, small: bool) -> dict[str, Any]:
    tickets, outstanding, steps = (20_000, 100, (100,)) if small else (LONG, OUTSTANDING, BOOKKEEPING)
    return {
        "bookkeeping": [{"groups": groups, "seconds": bookkeeping_s(groups)} for groups in steps],
        "restart": asdict(uvloop.run(restart(directory, tickets, outstanding))),
    }


def _told(report: dict[str, Any]) -> Iterator[str]:
    for step in report.get("bookkeeping", ()):
        yield f"bookkeeping of a step of {step['groups']:,} groups: {step['seconds']:.2f} s"
    if after := report.get("restart"):
        yield f"start after {after['tickets']:,} tickets with {after['outstanding']:,} outstanding:"
        yield f"  learner {after['learner_s']:.2f} s, {after['learner_peak_mib']:.0f} MiB at its peak"
        yield f"  controller {after['controller_s']:.2f} s to its first ticket, {after['scan_s']:.2f} s to all it knows"


def _growth(rows: Sequence[ScaleRow]) -> tuple[int, float] | None:
    """Return the first row that keeps the machine busy, and the CPU per group of the last row over that row's."""
    busy = [place for place, row in enumerate(rows[:-1]) if row.actors >= 10]
    return (busy[0], rows[-1].cpu_ms_per_group / rows[busy[0]].cpu_ms_per_group) if busy else None


async def _make_model(directory: Path) -> None:
    (directory / "logs").mkdir()
    await make_model(directory)


async def _measure(directory: Path, count: int, small: bool) -> ScaleRow:
    async with _running(directory, count) as cluster:
        # The first step has the start of everything in it.
        await cluster.until_step(1, START_S)
        before = await cluster.sample()
        await asyncio.sleep(SMALL_SECONDS if small else SECONDS)
        await cluster.until_step(max(before.step + STEPS, await cluster.step() + 1), START_S)
        after = await cluster.sample()
        groups, seconds = after.groups - before.groups, after.at - before.at
        cpu_ms = {role: 1e3 * (after.cpu_s[role] - before.cpu_s[role]) / groups for role in cluster.roles}
        memory = {role: sum(each.memory_info().rss for each in found) / 2**20 for role, found in cluster.roles.items()}
        return ScaleRow(
            actors=count,
            groups_per_s=groups / seconds,
            messages_per_group=(after.messages - before.messages) / groups,
            bytes_per_group=(after.bytes - before.bytes) / groups,
            cpu_ms_per_group=sum(cpu_ms.values()) - cpu_ms["actors"],
            server_ms_per_group=cpu_ms["server"],
            controller_ms_per_group=cpu_ms["controller"],
            learner_ms_per_group=cpu_ms["learner"],
            actors_ms_per_group=cpu_ms["actors"],
            groups=groups,
            seconds=seconds,
            memory_mib={role: round(mib, 1) for role, mib in memory.items()},
            idle_messages_per_s=await _idle(cluster, count) if count >= IDLE_FROM and not small else None,
        )


async def _idle(cluster: ScaledRun, count: int) -> float:
    """Return how many messages per second an actor costs that waits for a ticket."""
    # Nobody issues tickets any more, and those that nobody holds are taken away.
    for role in ("controller", "learner"):
        cluster.roles[role][0].kill()
    await cluster.transport.purge(Stream.TICKETS, (await cluster.transport.extent(Stream.TICKETS)).last_sequence + 1)
    while (await cluster.transport.queue()).idle < count:  # noqa: ASYNC110 - nothing tells when the last one waits
        await asyncio.sleep(2 * POLL_S)
    before, began = await cluster.server.figures(), time.monotonic()
    await asyncio.sleep(IDLE_S)
    after, seconds = await cluster.server.figures(), time.monotonic() - began
    messages = sum(after[counter] - before[counter] for counter in ("in_msgs", "out_msgs"))
    return float(messages) / seconds / count


@asynccontextmanager
async def _running(directory: Path, count: int) -> AsyncIterator[ScaledRun]:
    """Start a run with its server, controller, learner and light actors; end them after the body."""
    place = directory / f"{count}-actors"
    place.mkdir()
    recipe = place / "recipe.toml"
    groups_per_step = max(LEAST_GROUPS_PER_STEP, count)
    recipe.write_text(RECIPE.format(directory=place, model=directory / "model", groups_per_step=groups_per_step))
    config = RunConfig.load([recipe])
    processes: list[asyncio.subprocess.Process] = []
    async with EmbeddedServer(place / "nats") as server:
        broker = config.broker.model_copy(update={"url": server.url})
        async with connected(config.run.name, broker) as transport:
            try:
                for role in ("controller", "learner"):
                    command = ["horizonrl.ops.cli.main", role, str(recipe), f"--broker.url={server.url}"]
                    processes.append(await _start(place / f"{role}.log", command))
                full, rest = divmod(count, PER_PROCESS)
                for number, share in enumerate([PER_PROCESS] * full + [rest] * (rest > 0)):
                    command = ["horizonrl.ops.bench.scale.light_actors", str(recipe), str(share), server.url]
                    processes.append(await _start(place / f"actors-{number}.log", command))
                await asyncio.gather(*(_ready(place, number) for number in range(len(processes) - 2)))
                controller, learner, *actors = [psutil.Process(process.pid) for process in processes]
                roles = {"server": [psutil.Process(server.pid)], "controller": [controller], "learner": [learner]}
                yield ScaledRun(server, transport, roles | {"actors": actors})
            finally:
                for process in processes:
                    with contextlib.suppress(ProcessLookupError):  # it has ended by itself
                        process.kill()
                    await process.wait()


async def _start(log_file: Path, command: Sequence[str]) -> asyncio.subprocess.Process:
    with log_file.open("wb") as sink:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            cwd=log_file.parent,
            # The model is not computed: more threads would only spin.
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            # Ctrl-C reaches the bench alone, which then ends everything.
            start_new_session=True,
            preexec_fn=bound(signal.SIGKILL),
        )


async def _ready(place: Path, number: int) -> None:
    """Wait until a process of light actors is connected. A log has no event, so this polls."""
    log_file, deadline = place / f"actors-{number}.log", time.monotonic() + START_S
    while READY not in await asyncio.to_thread(log_file.read_text):
        if time.monotonic() > deadline:
            raise RunFailed(f"the light actors did not connect within {START_S:g} s:\n{last_lines(log_file)}")
        await asyncio.sleep(2 * POLL_S)


def _cpu_s(process: psutil.Process) -> float:
    spent = process.cpu_times()
    return float(spent.user + spent.system)


def _raise_descriptors() -> None:
    """Let this process and its children open as many connections as the machine allows: two per actor at most."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
