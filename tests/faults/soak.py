"""`python -m tests.faults soak`: an undisturbed run at full speed, to find out what grows.

It runs the processes of the chaos suite for as long as you like. Every SAMPLE_S it samples the memory, descriptors and
threads of each process, the broker's streams and the run's files.
"""

import asyncio
import json
import shutil
import signal
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import uvloop
from rich.console import Console
from rich.table import Table

from horizonrl.broker.api import Key, Stream
from horizonrl.broker.state import StateStore
from horizonrl.common.state import Progress
from horizonrl.ops.terminal.console import plain_console
from tests.faults.cluster import Cluster, cluster, workplace

SAMPLE_S = 10.0
START_S = 180.0
STOP_S = 120.0
CHECKPOINT_EVERY = 50
"""Steps per checkpoint. At about four steps per second that is one every 12 s, so checkpoints do not dominate."""
PARTS = ("episodes", "checkpoints", "weights", "metrics.jsonl", "ledger.jsonl")
"""The parts of the run directory whose size is sampled."""


@dataclass(frozen=True, slots=True)
class Sample:
    at_s: float
    step: int
    groups: int
    """Settled tickets of all kinds."""
    rss_mb: dict[str, float]
    descriptors: dict[str, int]
    threads: dict[str, int]
    stream_messages: dict[str, int]
    stream_mb: dict[str, float]
    files_mb: dict[str, float]


def run(
    minutes: float,
    seed: int,
    json_file: Path | None = None,
    directory: Path | None = None,
    overrides: Sequence[str] = (),
) -> int:
    """Run for `minutes`. Return 0 if no role crashed and every role ended in order."""
    console = plain_console()
    with workplace("soak", directory) as place:
        console.print(f"soak: {minutes:g} minutes in {place}", soft_wrap=True)
        samples, crashes = uvloop.run(_soak(minutes, place, seed, overrides, console))
    report = {"passed": not crashes, "seed": seed, "crashes": crashes, **summary(samples)}
    if json_file is not None:
        json_file.write_text(
            json.dumps(report | {"samples": [asdict(sample) for sample in samples]}, indent=1)
            + "\n",
            encoding="utf-8",
        )
    for table in _tables(report):
        console.print(table)
    if report["passed"] and directory is None:
        shutil.rmtree(place)
    return 0 if report["passed"] else 1


async def _soak(
    minutes: float, place: Path, seed: int, overrides: Sequence[str], console: Console
) -> tuple[list[Sample], dict[str, list[int]]]:
    settings = [f"--learner.checkpoint_every={CHECKPOINT_EVERY}", *overrides]
    samples: list[Sample] = []
    # The proxy carries every byte in this process's Python: it would be what is measured.
    async with cluster("soak", place, seed, settings, through_proxy=False) as whole:
        await whole.until("the first RL step", lambda: whole.rl_step > 0, START_S)
        started = time.monotonic()
        while (at_s := time.monotonic() - started) < 60 * minutes:
            whole.check()
            samples.append(await _sample(whole, at_s))
            console.print(_progress_line(samples[-1]), highlight=False, soft_wrap=True)
            await asyncio.sleep(SAMPLE_S)
        for role in whole.roles.values():
            role.signal(signal.SIGTERM)
        await whole.ended(*whole.roles, timeout_s=STOP_S)
        return samples, {name: role.crashes for name, role in whole.roles.items() if role.crashes}


async def _sample(whole: Cluster, at_s: float) -> Sample:
    progress = await StateStore(whole.transport).get(Key.PROGRESS)
    assert isinstance(progress, Progress)
    extents = {stream.value: await whole.transport.extent(stream) for stream in Stream}
    found = _processes(whole)
    run_dir = whole.config.run_dir
    places = {part: run_dir / part for part in PARTS} | {
        "logs": whole.directory / "logs",
        "nats": whole.server.directory,
    }
    return Sample(
        at_s=round(at_s, 1),
        step=progress.step,
        groups=sum(ends.settled for ends in progress.outcomes.values()),
        rss_mb={name: round(process.memory_info().rss / 1e6, 1) for name, process in found.items()},
        descriptors={name: process.num_fds() for name, process in found.items()},
        threads={name: process.num_threads() for name, process in found.items()},
        stream_messages={name: extent.messages for name, extent in extents.items()},
        stream_mb={name: round(extent.stored_bytes / 1e6, 3) for name, extent in extents.items()},
        files_mb={name: round(_bytes_of(path) / 1e6, 3) for name, path in places.items()},
    )


def _processes(whole: Cluster) -> dict[str, psutil.Process]:
    """Return the running processes. One that has crashed is missing until it is started again."""
    pids = {
        name: role.process.pid for name, role in whole.roles.items() if role.process is not None
    }
    found: dict[str, psutil.Process] = {}
    for name, pid in {**pids, "broker": whole.server.pid}.items():
        with suppress(psutil.NoSuchProcess):
            found[name] = psutil.Process(pid)
    return found


def _bytes_of(place: Path) -> int:
    """Return the size of a file, or of all files in a directory. Files that disappear meanwhile count as 0."""
    total = 0
    for path in [place, *place.rglob("*")]:
        with suppress(FileNotFoundError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def _progress_line(sample: Sample) -> str:
    memory = ", ".join(f"{name} {value:.0f}" for name, value in sample.rss_mb.items())
    return f"{sample.at_s:7.0f} s  step {sample.step:6d}  groups {sample.groups:6d}  MB: {memory}"


def summary(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return speeds and, per process, stream and file, the first, last and largest value and the slope per hour."""
    first, last = samples[0], samples[-1]
    # A short soak has one sample, and no time between the first and the last.
    seconds = max(last.at_s - first.at_s, SAMPLE_S)
    facts: dict[str, Any] = {
        "minutes": round(last.at_s / 60, 1),
        "steps": last.step - first.step,
        "groups": last.groups - first.groups,
        "steps_per_s": round((last.step - first.step) / seconds, 2),
        "groups_per_s": round((last.groups - first.groups) / seconds, 2),
    }
    for name in ("rss_mb", "descriptors", "threads", "stream_messages", "stream_mb", "files_mb"):
        series: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for sample in samples:
            for key, value in getattr(sample, name).items():
                series[key].append((sample.at_s, value))
        facts[name] = {key: _figures(points) for key, points in series.items()}
    return facts


def _figures(points: Sequence[tuple[float, float]]) -> dict[str, float]:
    values = [value for _, value in points]
    return {
        "first": values[0],
        "last": values[-1],
        "max": max(values),
        "per_hour": round(per_hour(points), 2),
    }


def per_hour(points: Sequence[tuple[float, float]]) -> float:
    """Return the least-squares slope, per hour, of the second half of the `(seconds, value)` points.

    The first half is left out because caches and buffers fill in it.
    """
    times, values = np.array(points[len(points) // 2 :]).T
    return 3600 * float(np.polyfit(times, values, 1)[0]) if len(times) > 1 else 0.0


def _tables(report: dict[str, Any]) -> list[Table]:
    title = (
        f"{report['minutes']} minutes, {report['steps']} steps ({report['steps_per_s']}/s), "
        f"{report['groups']} groups ({report['groups_per_s']}/s)"
    )
    tables: list[Table] = []
    for name in ("rss_mb", "descriptors", "threads", "stream_messages", "stream_mb", "files_mb"):
        table = Table(
            name.replace("_", " "),
            "first",
            "last",
            "max",
            "per hour",
            title=None if tables else title,
        )
        for key, figures in report[name].items():
            table.add_row(
                key, *(f"{figures[column]:g}" for column in ("first", "last", "max", "per_hour"))
            )
        tables.append(table)
    return tables
