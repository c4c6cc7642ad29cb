"""`horizonrl study timeline`: where each second of a run on one machine went, by role, from its logs and metrics.

It reads what every run of `train` leaves behind, so any run can be looked at afterwards: `logs/*.log` for the starts,
the weights and the checkpoints, `metrics.jsonl` for the steps and the waits.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from horizonrl.common.errors import ConfigError
from horizonrl.common.run_dir import LOGS, METRICS, REPORT
from horizonrl.ops.rundir.lines import LineTail, read_lines
from horizonrl.ops.rundir.troubles import STARTED, TroubleReader, event_time
from horizonrl.ops.terminal.console import plain_console

Logs = dict[str, list[dict[str, Any]]]
"""The events of each part."""

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
        seconds = sum(
            span.end_s - span.begin_s for span in spans if (span.role, span.what) == (role, what)
        )
        table.add_row(role, what, f"{seconds:.1f}", f"{seconds / total_s:.0%}")
    plain_console().print(table)
    first = min((span.end_s for span in spans if span.what == "rl"), default=None)
    print(
        f"{total_s:.0f} s in all"
        + ("" if first is None else f", the first RL step after {first:.0f} s")
    )
    if svg_file is not None:
        draw(spans, run_dir.name, svg_file)
    return 0


def read(run_dir: Path) -> list[Span]:
    """Return the spans of a run's first start. Raises ConfigError for a directory that `train` has not filled."""
    logs = _read_logs(run_dir / LOGS)
    began = _first(logs["console"], STARTED)
    if began is None or not (run_dir / METRICS).is_file():
        raise ConfigError(
            f"{run_dir} is not the directory of a run of `horizonrl train`: it has no logs and no metrics"
        )
    spans = [*_learner(logs["learner"], read_lines(run_dir / METRICS), began)]
    for name, events in logs.items():
        if name.startswith("actor"):
            spans += _actor(name, events, began)
    spans += _evaluations(logs, began)
    ended = _first(logs["learner"], "learner_ended")
    # The export and the report follow, and write no log: their last file tells when they were done.
    report = run_dir / REPORT
    if ended is not None and report.is_file():
        spans.append(Span("console", "end", ended - began, report.stat().st_mtime - began))
    return [span for span in spans if span.end_s > span.begin_s]


def _learner(
    events: list[dict[str, Any]], steps: list[dict[str, Any]], began: float
) -> Iterator[Span]:
    started = _first(events, "learner_started")
    if started is not None:
        yield Span("learner", "start", 0.0, started - began)
    stalls = {
        event["step"]: event["begin_s"]
        for event in events
        if event["event"] == "checkpoint_written"
    }
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
                name,
                "weights",
                event["time"] - began - event["fetch_s"] - event["apply_s"],
                event["time"] - began,
            )


def _evaluations(logs: Logs, began: float) -> Iterator[Span]:
    """Yield each round of evaluation, from its tickets to its result."""
    issued = [
        event["time"]
        for event in logs["controller"]
        if event["event"] == "tickets_issued" and event["kind"] == "eval"
    ]
    judged = [event["time"] for event in logs["learner"] if event["event"] == "evaluated"]
    for begin, end in zip(issued, judged, strict=False):
        yield Span("evaluation", "evaluation", begin - began, end - began)


def draw(spans: list[Span], title: str, file: Path) -> None:
    """Draw one lane for each role, minutes from left to right."""
    import matplotlib
    from matplotlib.figure import Figure

    roles = list(dict.fromkeys(span.role for span in spans))
    style: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "horizonrl"}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(10, 1.2 + 0.5 * len(roles)), layout="constrained")
        axes = figure.subplots()
        for what in dict.fromkeys(span.what for span in spans):
            stretches = [span for span in spans if span.what == what]
            axes.barh(
                [roles.index(span.role) for span in stretches],
                [(span.end_s - span.begin_s) / 60 for span in stretches],
                left=[span.begin_s / 60 for span in stretches],
                color=COLOURS[what],
                label=what,
            )
        axes.set_yticks(range(len(roles)), roles)
        axes.invert_yaxis()
        axes.set(title=title, xlabel="minutes")
        figure.legend(loc="outside lower center", ncols=len(COLOURS), frameon=False)
        figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def _read_logs(folder: Path) -> Logs:
    """Return the events of each log, with their time in seconds since the epoch."""
    whole = {file: LineTail(file) for file in folder.glob("*.log")}
    logs: Logs = defaultdict(list)
    for file, event in TroubleReader(folder, whole).events():
        logs[file.stem].append(event | {"time": event_time(event)})
    return logs


def _first(events: list[dict[str, Any]], name: str) -> float | None:
    return next((float(event["time"]) for event in events if event["event"] == name), None)
