"""Panels and dashboards as Grafana's JSON; a panel's description is the help text of the metrics that it shows.

Plain dictionaries: the classic dashboard model, which every Grafana since 10 reads. Expressions are made by `last`,
`rate` and `quantile`, which refuse a metric that is not in the table of common/metrics.py.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from horizonrl.common.metrics import METRICS, PREFIX

DECLARED = {metric.name: metric for metric in METRICS}
SCHEMA_VERSION = 39
COLUMNS = 24
WIDTHS = {"timeseries": 8, "stat": 4}
HEIGHTS = {"timeseries": 8, "stat": 4}
WINDOWS = ("30m", "5m", "15m", "1h", "3h", "12h")
"""How far back rates and quantiles may look, the first unless another is chosen. Grafana's own `$__rate_interval` is a
minute at most zooms: with steps of eight minutes, counters that move once a step would show nothing but spikes."""
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, slots=True)
class Query:
    expression: str
    legend: str = ""
    exemplar: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    queries: Sequence[Query]
    unit: str = "short"
    kind: str = "timeseries"


@dataclass(frozen=True, slots=True)
class Dashboard:
    name: str
    title: str
    rows: dict[str, Sequence[Panel]]


def last(name: str, *by: str, legend: str = "", fold: str = "max") -> Query:
    """Return a gauge's present value, the largest of a run's roles or one for each value of `by`."""
    return Query(f"{fold}{_by(by)} ({_selector(name)})", legend or _legend(by))


def rate(name: str, *by: str, legend: str = "") -> Query:
    """Return a counter's increase per second, over the window that the reader has chosen."""
    return Query(f"sum{_by(by)} (rate({_selector(name)}[$window]))", legend or _legend(by))


def quantile(share: float, name: str, *by: str) -> Query:
    buckets = f"sum{_by((*by, 'le'))} (rate({_selector(name, '_bucket')}[$window]))"
    expression = f"histogram_quantile({share:g}, {buckets})"
    return Query(expression, f"p{100 * share:g} {_legend(by)}".strip(), DECLARED[name].exemplar)


def quantiles(name: str, *by: str) -> tuple[Query, Query]:
    return quantile(0.5, name, *by), quantile(0.95, name, *by)


def metric_names(expression: str) -> set[str]:
    """Return the metrics of ours that an expression reads, by their names in the table."""
    written = set(re.findall(rf"(?<![\w:]){PREFIX}(\w+)", expression))
    # A histogram is declared once and read as its _bucket, _sum and _count.
    return {
        name if name in DECLARED else re.sub(r"_(bucket|sum|count)$", "", name) for name in written
    }


def dashboard_json(dashboard: Dashboard) -> dict[str, Any]:
    """Return a dashboard as Grafana's file provisioning reads it."""
    return {
        "uid": f"horizonrl-{dashboard.name}",
        "title": f"HorizonRL · {dashboard.title}",
        "tags": ["horizonrl"],
        "schemaVersion": SCHEMA_VERSION,
        # Made from code: a change in the browser would be lost at the next start.
        "editable": False,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "links": [
            {"type": "dashboards", "title": "HorizonRL", "tags": ["horizonrl"], "keepTime": True}
        ],
        "templating": {"list": [_datasource_variable(), _run_variable(), _window_variable()]},
        "panels": _panels(dashboard.rows),
    }


def _panels(rows: dict[str, Sequence[Panel]]) -> list[dict[str, Any]]:
    """Lay the panels out: left to right, each row of the dashboard under its title."""
    placed: list[dict[str, Any]] = []
    y = 0
    for title, panels in rows.items():
        placed.append(
            {"type": "row", "title": title, "collapsed": False, "gridPos": _place(0, y, COLUMNS, 1)}
        )
        x, y, height = 0, y + 1, 0
        for panel in panels:
            if x + WIDTHS[panel.kind] > COLUMNS:
                x, y, height = 0, y + height, 0
            placed.append(_panel_json(panel, _place(x, y, WIDTHS[panel.kind], HEIGHTS[panel.kind])))
            x, height = x + WIDTHS[panel.kind], max(height, HEIGHTS[panel.kind])
        y += height
    return [{"id": number, **panel} for number, panel in enumerate(placed, start=1)]


def _panel_json(panel: Panel, position: dict[str, int]) -> dict[str, Any]:
    options: dict[str, Any] = {"reduceOptions": {"calcs": ["lastNotNull"]}}
    if panel.kind == "timeseries":
        options = {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi"},
        }
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": _description(panel),
        "datasource": SOURCE,
        "gridPos": position,
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "options": options,
        "targets": [
            _target(letter, query) for letter, query in zip("ABCDEFGH", panel.queries, strict=False)
        ],
    }


def _target(letter: str, query: Query) -> dict[str, Any]:
    return {
        "refId": letter,
        "datasource": SOURCE,
        "expr": query.expression,
        "legendFormat": query.legend or "__auto",
        "exemplar": query.exemplar,
    }


def _description(panel: Panel) -> str:
    names = {
        name: None for query in panel.queries for name in sorted(metric_names(query.expression))
    }
    return "\n".join(f"`{PREFIX}{name}`: {DECLARED[name].help}" for name in names)


def _datasource_variable() -> dict[str, Any]:
    return {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
    }


def _run_variable() -> dict[str, Any]:
    query = f"label_values({PREFIX}broker_connected, run)"
    # refresh 2 asks again with each change of the time range, so that a run that has just begun is in the list.
    return {
        "name": "run",
        "label": "Run",
        "type": "query",
        "datasource": SOURCE,
        "query": query,
        "refresh": 2,
    }


def _window_variable() -> dict[str, Any]:
    options = [
        {"text": window, "value": window, "selected": window == WINDOWS[0]} for window in WINDOWS
    ]
    return {
        "name": "window",
        "label": "Rates over",
        "type": "custom",
        "query": ", ".join(WINDOWS),
        "options": options,
        "current": options[0],
    }


def _selector(name: str, suffix: str = "") -> str:
    return f'{PREFIX}{DECLARED[name].name}{suffix}{{run="$run"}}'


def _by(labels: Sequence[str]) -> str:
    return f" by ({', '.join(labels)})" if labels else ""


def _legend(labels: Sequence[str]) -> str:
    return " ".join(f"{{{{{label}}}}}" for label in labels)


def _place(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}
