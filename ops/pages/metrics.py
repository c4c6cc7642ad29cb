"""`python -m horizonrl.ops.pages.metrics`: write docs/metrics.md from the table in common/metrics.py."""

from pathlib import Path

from horizonrl.common.metrics import PREFIX, SERVED_CALLS, TABLE, Metric
from horizonrl.common.types import Kind, StopReason

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
HEAD = """\
# Metrics

Made from `common/metrics.py` by `python -m horizonrl.ops.pages.metrics`; do not edit.

Each role answers `/healthz`, `/readyz` and `/metrics` on one port (`metrics.host`, `metrics.port`); of a learner's
ranks the first. Counters and histograms stand at 0 from the start, a gauge appears with its first value, and nothing is
measured a token. Where an exemplar is named, a reading in OpenMetrics format carries the id of a ticket, which
`horizonrl lineage RUN_DIR --ticket ID` follows.

| label | values |
|---|---|
| `env` | the run's environments; what a ticket of any other does counts as `other` |
| `kind` | {kinds} |
| `call` | {calls} |
| `stop` | {stops} |
| `reason` | given with the metric |
"""


def page() -> str:
    """Return the page's text."""
    head = HEAD.format(kinds=", ".join(Kind), stops=", ".join(StopReason), calls=", ".join(SERVED_CALLS))
    parts = [f"## {_title(role)}\n\n{_section(metrics)}" for role, metrics in TABLE.items()]
    return "\n".join([head, *parts])


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
    PAGE.write_text(page())
