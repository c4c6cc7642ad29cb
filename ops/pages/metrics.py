"""`python -m horizonrl.ops.pages.metrics`: write docs/metrics.md from the tables of quantities and of metrics."""

from pathlib import Path

from horizonrl.common.metrics import PREFIX, SERVED_CALLS, TABLE, WEIGHTS_FORMS, Metric
from horizonrl.common.quantities import QUANTITIES, Quantity
from horizonrl.common.types import Kind, StopReason

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
HEAD = """\
# Metrics

Made from `common/quantities.py` and `common/metrics.py` by `python -m horizonrl.ops.pages.metrics`; do not edit.

## What a step measures

A quantity has one name. It is the key in `metrics.jsonl` and in `horizonrl status --json`. A tracker has it as
`train/NAME`. Prometheus has it as `{prefix}NAME`, where `_s` becomes `_seconds` and a counter ends with `_total`. The
last two columns are its header on the console and the title of its curve in the report.

{quantities}
Success, reward, turns and truncation are those of every group consumed for the step, dropped ones included. A quantity
that was not measured is null in the file and keeps its last value in Prometheus.

## Prometheus

Each role answers `/healthz`, `/readyz` and `/metrics` on one port (`metrics.host`, `metrics.port`); of a learner's
ranks only the first does. Counters and histograms start at 0. A gauge appears with its first value. Nothing is measured
per token. Where a metric has an exemplar, a scrape in OpenMetrics format carries a ticket's id, which
`horizonrl lineage RUN_DIR --ticket ID` follows.

| label | values |
|---|---|
| `env` | the run's environments; `other` for a ticket that names any other |
| `category` | an environment's categories of tasks, and `(repeated)` for tasks that are drawn again |
| `kind` | {kinds} |
| `form` | {forms} |
| `call` | {calls} |
| `stop` | {stops} |
| `reason` | listed with the metric |
"""


def page() -> str:
    """Return the page's text."""
    head = HEAD.format(
        prefix=PREFIX,
        quantities=_quantities(),
        kinds=", ".join(Kind),
        forms=", ".join(WEIGHTS_FORMS),
        calls=", ".join(SERVED_CALLS),
        stops=", ".join(StopReason),
    )
    parts = [f"### {_title(role)}\n\n{_section(metrics)}" for role, metrics in TABLE.items()]
    return "\n".join([head, *parts])


def _quantities() -> str:
    rows = ["| name | unit | meaning | Prometheus | console | report |", "|---|---|---|---|---|---|"]
    return "\n".join([*rows, *map(_row, QUANTITIES.values())]) + "\n"


def _row(quantity: Quantity) -> str:
    metric = f"`{PREFIX}{quantity.metric_name}`" if quantity.metric else ""
    column = f"`{quantity.column}`" if quantity.column else ""
    meaning = quantity.meaning.replace("|", "\\|")
    return f"| `{quantity.name}` | {quantity.unit} | {meaning} | {metric} | {column} | {quantity.curve} |"


def _title(role: str) -> str:
    return {"every": "Every role of a run", "server": "Environment server"}.get(role, role.capitalize())


def _section(metrics: tuple[Metric, ...]) -> str:
    rows = ["| metric | kind | labels | meaning |", "|---|---|---|---|"]
    for metric in metrics:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        rows.append(f"| `{PREFIX}{metric.name}` | {metric.kind} | {labels} | {_meaning(metric)} |")
    return "\n".join(rows) + "\n"


def _meaning(metric: Metric) -> str:
    parts = [metric.help.replace("|", "\\|")]
    if metric.reasons:
        parts.append(f"Reasons: {', '.join(metric.reasons)}.")
    if metric.buckets:
        parts.append(f"Buckets: {', '.join(f'{bucket:g}' for bucket in metric.buckets)}.")
    if metric.exemplar:
        parts.append("Exemplar: its ticket.")
    return " ".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
