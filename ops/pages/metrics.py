"""`python -m horizonrl.ops.pages.metrics`: write docs/metrics.md from the tables of quantities and of metrics."""

from pathlib import Path

from horizonrl.common.metrics import OF_A_STEP, PREFIX, SERVED_CALLS, TABLE, WEIGHTS_FORMS, Metric
from horizonrl.common.quantities import QUANTITIES, Quantity
from horizonrl.common.types import Kind, StopReason

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
HEAD = """\
# Metrics

Made from `common/quantities.py` and `common/metrics.py` by `python -m horizonrl.ops.pages.metrics`; do not edit.

## What a step measures

A quantity has one name: the key in `metrics.jsonl` and in `horizonrl status --json`, and `train/NAME` in a tracker. The
last column has its `column` on the console and its curve in the report.

{quantities}
Success, reward, turns and truncation cover every group consumed for the step, dropped ones included. A quantity that
was not measured is null in the file and keeps its last value in Prometheus. Metrics that the learner's table below
leaves out are counters if they end with `_total`, otherwise gauges with the value of the last step.

## Prometheus

Each role serves `/metrics` on one port ([how to scrape it](watching.md#metrics-and-alerts)); of a learner's ranks
only the first does. Counters and histograms start at 0. A gauge appears with its first value. An exemplar, in a scrape
in OpenMetrics format, is a ticket's id, which `horizonrl history lineage RUN_DIR --ticket ID` follows.

| label | values |
|---|---|
| `env` | the run's environments, or `other` |
| `category` | an environment's categories, and `(repeated)` for tasks that are drawn again |
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
    rows = ["|name|unit|meaning|Prometheus|shown as|", "|---|---|---|---|---|"]
    return "\n".join([*rows, *map(_row, QUANTITIES.values())]) + "\n"


def _row(quantity: Quantity) -> str:
    metric = f"`{PREFIX}{quantity.metric_name}`" if quantity.metric else ""
    shown = ", ".join(
        [f"`{quantity.column}`"] * bool(quantity.column) + [quantity.curve] * bool(quantity.curve)
    )
    meaning = quantity.meaning.replace("|", "\\|")
    return f"|`{quantity.name}`|{quantity.unit}|{meaning}|{metric}|{shown}|"


def _title(role: str) -> str:
    return {"every": "Every role of a run", "server": "Environment server"}.get(
        role, role.capitalize()
    )


def _section(metrics: tuple[Metric, ...]) -> str:
    rows = ["|metric|kind|meaning|", "|---|---|---|"]
    for metric in metrics:
        if metric in OF_A_STEP:  # the table of quantities has it
            continue
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        kind = f"{metric.kind} by {labels}" if labels else metric.kind
        rows.append(f"|`{PREFIX}{metric.name}`|{kind}|{_meaning(metric)}|")
    return "\n".join(rows) + "\n"


def _meaning(metric: Metric) -> str:
    parts = [metric.help.replace("|", "\\|")]
    if metric.reasons:
        parts.append(f"Reasons: {', '.join(metric.reasons)}.")
    if metric.buckets:
        parts.append(f"Buckets: {metric.buckets[0]:g}–{metric.buckets[-1]:g}.")
    if metric.exemplar:
        parts.append("Has an exemplar.")
    return " ".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
