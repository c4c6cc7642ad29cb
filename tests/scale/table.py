"""`python -m tests.scale`: a table of rows as actors are added, and what a large step and a restart cost."""

import json
import os
import resource
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import uvloop
from rich.table import Table

from horizonrl.ops.terminal.console import plain_console
from horizonrl.ops.terminal.waiting import waiting
from tests.processes import make_tiny_model_apart
from tests.scale.long_run import OUTSTANDING, bookkeeping_s, restart
from tests.scale.rows import ScaleRow, forecast_s, measure

ROWS = (1, 10, 100, 1_000, 5_000)
SMALL_ROWS = (1, 20)
BOOKKEEPING = (500, 1_000, 2_000, 4_000)
"""Groups of the steps whose bookkeeping is measured."""
LONG = 10_000_000
"""Tickets of the run that is started again."""


def run(actors: Sequence[int], small: bool, json_file: Path | None) -> int:
    """Measure each number of actors in turn and print a table."""
    _raise_descriptors()
    table = Table(
        "actors", "groups/s", "messages", "bytes", "CPU ms", "low-high", "server", "controller", "learner", "actors'",
        "idle msg/s", title="per settled group", padding=(0, 0),
    )  # fmt: skip
    rows: list[ScaleRow] = []
    report: dict[str, Any] = {
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0],
        "rows": [],
    }
    with tempfile.TemporaryDirectory(prefix="horizonrl-scale-") as name:
        directory = Path(name)
        make_tiny_model_apart(directory / "model")
        for count in actors or (SMALL_ROWS if small else ROWS):
            what = f"measuring {count:,} actors, for about {forecast_s(count, small):.0f} s"
            with waiting(plain_console(stderr=True), what, announced=True):
                row = uvloop.run(
                    measure(directory / f"{count}-actors", directory / "model", count, small)
                )
            rows.append(row)
            report["rows"].append(asdict(row))
            table.add_row(*_cells(row))
            # After each row: a later one may fail.
            _write(report, json_file)
        if not actors:  # what does not depend on their number
            with waiting(
                plain_console(stderr=True), "measuring a large step and a long run", announced=True
            ):
                report |= _long(directory / "long", small)
    console = plain_console()
    console.print(table)
    for line in _lines(report):
        console.print(line)
    if (growth := _growth(rows)) is not None:
        console.print(
            f"CPU per group from {rows[growth[0]].actors:,} to {rows[-1].actors:,} actors: {growth[1]:.2f} x"
        )
        report["cpu_growth"] = growth[1]
    _write(report, json_file)
    return 0


def _cells(row: ScaleRow) -> tuple[str, ...]:
    numbers = (
        row.server_ms_per_group,
        row.controller_ms_per_group,
        row.learner_ms_per_group,
        row.actors_ms_per_group,
    )
    return (
        f"{row.actors:,}",
        f"{row.groups_per_s:.0f}",
        f"{row.messages_per_group:.1f}",
        f"{row.bytes_per_group:,.0f}",
        f"{row.cpu_ms_per_group:.2f}",
        f"{row.cpu_ms_low:.2f}-{row.cpu_ms_high:.2f}",
        *(f"{number:.2f}" for number in numbers),
        "" if row.idle_messages_per_s is None else f"{row.idle_messages_per_s:.3f}",
    )


def _write(report: dict[str, Any], json_file: Path | None) -> None:
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def _long(directory: Path, small: bool) -> dict[str, Any]:
    tickets, outstanding, steps = (
        (20_000, 100, (100,)) if small else (LONG, OUTSTANDING, BOOKKEEPING)
    )
    return {
        "bookkeeping": [{"groups": groups, "seconds": bookkeeping_s(groups)} for groups in steps],
        "restart": asdict(uvloop.run(restart(directory, tickets, outstanding))),
    }


def _lines(report: dict[str, Any]) -> Iterator[str]:
    for step in report.get("bookkeeping", ()):
        yield f"bookkeeping of a step of {step['groups']:,} groups: {step['seconds']:.2f} s"
    if after := report.get("restart"):
        yield f"start after {after['tickets']:,} tickets with {after['outstanding']:,} outstanding:"
        yield f"  learner {after['learner_s']:.2f} s, {after['learner_peak_mib']:.0f} MiB at its peak"
        yield f"  controller {after['controller_s']:.2f} s to its first ticket, {after['scan_s']:.2f} s to all it knows"


def _growth(rows: Sequence[ScaleRow]) -> tuple[int, float] | None:
    """Return the first row whose actors keep up the common rate, and the CPU per group of the last row over its."""
    busy = [place for place, row in enumerate(rows[:-1]) if row.actors >= 10]
    return (busy[0], rows[-1].cpu_ms_per_group / rows[busy[0]].cpu_ms_per_group) if busy else None


def _raise_descriptors() -> None:
    """Let this process and its children open as many connections as the machine allows: two per actor at most."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
