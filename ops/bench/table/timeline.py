"""`horizonrl bench timeline`: where each second of a run on one machine went, by role, from its logs and metrics.

It reads what every run of `train` leaves behind, so any run can be looked at afterwards: `logs/*.log` for the starts,
the weights and the checkpoints, `metrics.jsonl` for the steps and the waits.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from rich.table import Table

from horizonrl.common.errors import ConfigError
from horizonrl.ops.terminal.console import plain_console

COLOURS = {
    "start": "#9aa5b1",
    "wait": "#e8ecf0",
    "imitation": "#7fb77e",
    "rl": "#3b7dd8",
    "checkpoint": "#d9822b",
    "weights": "#8e5bb5",
    "evaluation": "#e3b505",
    "end": "#5c6670",
}
WIDTH, LEFT, TOP, LANE, GAP = 1000, 90, 30, 34, 12
TICK_S = 60


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of one role's time, in seconds since the start of `train`."""

    role: str
    what: str
    begin_s: float
    end_s: float


def run(run_dir: Path, svg_file: Path | None) -> int:
    """Print how long each role did what; write the picture if a file is named."""
    spans = read(run_dir)
    total_s = max(span.end_s for span in spans)
    table = Table("role", "what", "seconds", "share")
    for role, what in dict.fromkeys((span.role, span.what) for span in spans):
        seconds = sum(span.end_s - span.begin_s for span in spans if (span.role, span.what) == (role, what))
        table.add_row(role, what, f"{seconds:.1f}", f"{seconds / total_s:.0%}")
    plain_console().print(table)
    first = min((span.end_s for span in spans if span.what == "rl"), default=None)
    print(f"{total_s:.0f} s in all" + ("" if first is None else f", the first RL step after {first:.0f} s"))
    if svg_file is not None:
        svg_file.write_text(svg(spans, run_dir.name), encoding="utf-8")
    return 0


def read(run_dir: Path) -> list[Span]:
    """Return the spans of a run's first start. Raises ConfigError for a directory that `train` has not filled."""
    logs = {file.stem: list(_events(file)) for file in sorted((run_dir / "logs").glob("*.log"))}
    began = _first(logs.get("console", []), "train_started")
    metrics = run_dir / "metrics.jsonl"
    if began is None or not metrics.is_file():
        raise ConfigError(
            f"{run_dir} is not the directory of a run of `horizonrl train`: it has no logs and no metrics"
        )
    steps = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    spans = [*_learner(logs.get("learner", []), steps, began)]
    for name, events in logs.items():
        if name.startswith("actor"):
            spans += _actor(name, events, began)
    spans += _evaluations(logs, began)
    ended = _first(logs.get("learner", []), "learner_ended")
    # The export and the report follow, and write no log: their last file tells when they were done.
    report = run_dir / "report.html"
    if ended is not None and report.is_file():
        spans.append(Span("console", "end", ended - began, report.stat().st_mtime - began))
    return [span for span in spans if span.end_s > span.begin_s]


def _learner(events: list[dict[str, Any]], steps: list[dict[str, Any]], began: float) -> Iterator[Span]:
    started = _first(events, "learner_started")
    if started is not None:
        yield Span("learner", "start", 0.0, started - began)
    stalls = {event["step"]: event["begin_s"] for event in events if event["event"] == "checkpoint_written"}
    for step in steps:
        end_s = step["time"] - began
        begin_s = end_s - step["step_s"]
        stall_s = stalls.get(step["step"], 0.0)
        yield Span("learner", "wait", begin_s - step["wait_s"], begin_s)
        yield Span("learner", step["phase"], begin_s, end_s - stall_s)
        yield Span("learner", "checkpoint", end_s - stall_s, end_s)
    ended = _first(events, "learner_ended")
    if ended is not None and steps:
        yield Span("learner", "wait", steps[-1]["time"] - began, ended - began)


def _actor(name: str, events: list[dict[str, Any]], began: float) -> Iterator[Span]:
    opened = _first(events, "service_opened")
    if opened is not None:
        yield Span(name, "start", 0.0, opened - began)
    for event in events:
        if event["event"] == "weights_applied":
            yield Span(
                name, "weights", event["time"] - began - event["fetch_s"] - event["apply_s"], event["time"] - began
            )


def _evaluations(logs: dict[str, list[dict[str, Any]]], began: float) -> Iterator[Span]:
    """Yield each round of evaluation, from its tickets to its result."""
    issued = [e["time"] for e in logs.get("controller", []) if e["event"] == "tickets_issued" and e["kind"] == "eval"]
    judged = [e["time"] for e in logs.get("learner", []) if e["event"] == "evaluated"]
    for begin, end in zip(issued, judged, strict=False):
        yield Span("evaluation", "evaluation", begin - began, end - began)


def svg(spans: list[Span], title: str) -> str:
    """Draw one lane for each role, seconds from left to right."""
    roles = list(dict.fromkeys(span.role for span in spans))
    total_s = max(span.end_s for span in spans)
    scale = (WIDTH - LEFT - 10) / total_s
    height = TOP + len(roles) * (LANE + GAP) + 60
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"',
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f"<title>{escape(title)}: where each second went</title>",
    ]
    bottom = TOP + len(roles) * (LANE + GAP)
    for tick in range(0, int(total_s) + 1, TICK_S):
        x = LEFT + tick * scale
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 6}" y2="{bottom}" stroke="#d0d5da"/>')
        parts.append(f'<text x="{x:.1f}" y="{TOP - 12}" text-anchor="middle" fill="#444">{tick // 60} min</text>')
    for number, role in enumerate(roles):
        y = TOP + number * (LANE + GAP)
        parts.append(f'<text x="{LEFT - 8}" y="{y + LANE / 2 + 4}" text-anchor="end" fill="#222">{escape(role)}</text>')
        for span in spans:
            if span.role == role:
                x, width = LEFT + span.begin_s * scale, (span.end_s - span.begin_s) * scale
                parts.append(
                    f'<rect x="{x:.1f}" y="{y}" width="{max(width, 0.5):.1f}" height="{LANE}" '
                    f'fill="{COLOURS[span.what]}">'
                    f"<title>{span.what}, {span.begin_s:.0f} to {span.end_s:.0f} s</title></rect>"
                )
    for number, what in enumerate(dict.fromkeys(span.what for span in spans)):
        x = LEFT + number * 112
        parts.append(f'<rect x="{x}" y="{bottom + 16}" width="12" height="12" fill="{COLOURS[what]}"/>')
        parts.append(f'<text x="{x + 18}" y="{bottom + 26}" fill="#222">{what}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _events(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a log with their time in seconds since the epoch; other lines are libraries'."""
    for line in file.read_text(errors="replace", encoding="utf-8").splitlines():
        if line.startswith("{") and '"timestamp"' in line:
            event = json.loads(line)
            yield event | {"time": datetime.fromisoformat(event["timestamp"]).timestamp()}


def _first(events: list[dict[str, Any]], name: str) -> float | None:
    return next((float(event["time"]) for event in events if event["event"] == name), None)
