"""The comparison of a study's variants: intervals for each variant, and the results as JSON.

Place in the flow: outcomes of finished runs → **comparison** → `results.json`, of which `report.py` makes
`report.md`, and the bands that `plots.py` draws.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from horizonrl.common.errors import ConfigError
from horizonrl.common.statistics import mean
from horizonrl.ops.studies.contrasts import (
    Contrast,
    contrasts,
    count_successes,
    counts_at,
    least_budget,
)
from horizonrl.ops.studies.outcome import AXES, RunOutcome
from horizonrl.ops.studies.played import Played, add_up
from horizonrl.ops.studies.statistics import (
    LEVEL,
    Array,
    Interval,
    difference_interval,
    success_band,
    success_interval,
)
from horizonrl.ops.studies.study import Study

POINTS = 60
"""Number of points of a drawn curve."""


@dataclass(frozen=True, slots=True)
class ReportedRun:
    """An outcome, and where it comes from."""

    outcome: RunOutcome
    commit: str
    machine: str


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """One variant over its seeds."""

    variant: str
    seeds: tuple[int, ...]
    final: Interval
    start: Interval
    improvement: Interval
    ess_mean: float | None
    ess_min: float | None
    staleness_mean: float | None
    staleness_max: float | None
    truncated_share: float | None
    collapsed: int | None
    """Number of seeds that collapsed (`RunOutcome.collapsed`); None if that could not be seen."""
    gave_up: int
    environment_steps: float
    generated_tokens: float
    wall_s: float
    played: tuple[Played, ...]
    """Training episodes by horizon, of all seeds."""


@dataclass(frozen=True, slots=True)
class Comparison:
    rows: Sequence[ComparisonRow]
    contrasts: Sequence[Contrast]
    budgets: dict[str, float]
    split: str
    """Of the tasks that success is of."""


@dataclass(frozen=True, slots=True)
class Band:
    """A mean curve and its interval, in shares."""

    places: Array
    mean: Array
    low: Array
    high: Array


def compare(study: Study, outcomes: Sequence[RunOutcome]) -> Comparison:
    """Summarise the outcomes of at least one run, variants in the order of the study.

    Raises ConfigError for runs that were evaluated on different splits.
    """
    splits = sorted({outcome.split for outcome in outcomes})
    if "test" in splits and "validation" in splits:
        raise ConfigError(
            f"study {study.name}: some runs were evaluated on test tasks, others on validation tasks, "
            "which do not compare: give a new --directory"
        )
    budgets = {axis: least_budget(outcomes, axis) for axis in AXES if axis != "steps"}
    by_variant = {
        variant.name: sorted(
            (run for run in outcomes if run.variant == variant.name), key=lambda run: run.seed
        )
        for variant in study.variants
    }
    rows = [_row(runs) for runs in by_variant.values() if runs]
    results = contrasts(study.pairs, outcomes, list(budgets), study.primary_axis)
    return Comparison(rows, results, budgets, " and ".join(splits))


def bands(outcomes: Sequence[RunOutcome], axis: str) -> dict[str, Band]:
    """Return each variant's curve along an axis, over the range that all of its seeds cover."""
    results: dict[str, Band] = {}
    for variant in dict.fromkeys(outcome.variant for outcome in outcomes):
        runs = [outcome for outcome in outcomes if outcome.variant == variant]
        first = max(getattr(outcome.curve, axis)[0] for outcome in runs)
        last = min(getattr(outcome.curve, axis)[-1] for outcome in runs)
        places = np.linspace(first, max(first, last), POINTS)
        results[variant] = Band(places, *success_band(counts_at(runs, axis, places)))
    return results


def to_json(comparison: Comparison, reported: Sequence[ReportedRun]) -> dict[str, Any]:
    """Return all results as a JSON-serialisable dictionary."""
    runs = [
        asdict(outcome.outcome) | {"commit": outcome.commit, "machine": outcome.machine}
        for outcome in reported
    ]
    for run in runs:
        run["curve"] = {name: values.tolist() for name, values in run["curve"].items()}
    return {
        "split": comparison.split,
        "level": LEVEL,
        "budgets": comparison.budgets,
        "variants": [
            asdict(row) | {"played": [asdict(part) | part.shares() for part in row.played]}
            for row in comparison.rows
        ],
        "contrasts": [asdict(contrast) for contrast in comparison.contrasts],
        "runs": runs,
    }


def plot_name(axis: str) -> str:
    return f"success-{axis.replace('_', '-')}.svg"


def _row(runs: Sequence[RunOutcome]) -> ComparisonRow:
    finals, starts = (
        count_successes([outcome.final for outcome in runs]),
        count_successes([outcome.start for outcome in runs]),
    )
    collapses = [outcome.collapsed for outcome in runs if outcome.collapsed is not None]
    return ComparisonRow(
        variant=runs[0].variant,
        seeds=tuple(outcome.seed for outcome in runs),
        final=success_interval(finals),
        start=success_interval(starts),
        improvement=difference_interval(finals, starts),
        ess_mean=_mean_known([outcome.ess_mean for outcome in runs]),
        ess_min=min(
            (outcome.ess_min for outcome in runs if outcome.ess_min is not None), default=None
        ),
        staleness_mean=_mean_known([outcome.staleness_mean for outcome in runs]),
        staleness_max=max(
            (run.staleness_max for run in runs if run.staleness_max is not None), default=None
        ),
        truncated_share=_mean_known([outcome.truncated_share for outcome in runs]),
        collapsed=sum(collapses) if collapses else None,
        gave_up=sum(outcome.gave_up for outcome in runs),
        environment_steps=float(np.mean([outcome.environment_steps for outcome in runs])),
        generated_tokens=float(np.mean([outcome.generated_tokens for outcome in runs])),
        wall_s=float(np.mean([outcome.wall_s for outcome in runs])),
        played=add_up(part for outcome in runs for part in outcome.played),
    )


def _mean_known(values: Sequence[float | None]) -> float | None:
    return mean([value for value in values if value is not None])
