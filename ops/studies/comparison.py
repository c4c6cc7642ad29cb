"""The comparison of a study's variants: intervals for each variant, and the results as JSON.

Place in the flow: outcomes of finished runs → **comparison** → `results.json`, of which `report.py` makes
`report.md`, and the bands that `plots.py` draws.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from horizonrl.common.statistics import mean
from horizonrl.ops.studies.contrasts import (
    Contrast,
    contrasts,
    counts_at,
    counts_of,
    least_budget,
)
from horizonrl.ops.studies.earlier import ReportedRun
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
class ComparisonRow:
    """One variant over its seeds."""

    variant: str
    seeds: tuple[int, ...]
    final: Interval
    start: Interval
    improvement: Interval
    at_equal_cost: dict[str, Interval]
    """Success at the largest budget that every run reached, for each axis except steps."""
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
    measured: str


@dataclass(frozen=True, slots=True)
class Band:
    """A mean curve and its interval, in shares."""

    places: Array
    mean: Array
    low: Array
    high: Array


def compare(study: Study, outcomes: Sequence[RunOutcome]) -> Comparison:
    """Summarise the outcomes of at least one run, variants in the order of the study."""
    budgets = {axis: least_budget(outcomes, axis) for axis in measured_axes(outcomes) if axis != "steps"}
    by_variant = {
        variant.name: sorted((each for each in outcomes if each.variant == variant.name), key=lambda each: each.seed)
        for variant in study.variants
    }
    rows = [_row(own, budgets) for own in by_variant.values() if own]
    found = contrasts(study.pairs, outcomes, list(budgets), study.primary_axis)
    return Comparison(rows, found, budgets, " and ".join(sorted({each.measured for each in outcomes})))


def measured_axes(outcomes: Sequence[RunOutcome]) -> list[str]:
    """Return the axes that every run has measured: older releases did not count all of them."""
    return [axis for axis in AXES if all(np.isfinite(getattr(each.curve, axis)).all() for each in outcomes)]


def bands(outcomes: Sequence[RunOutcome], axis: str) -> dict[str, Band]:
    """Return each variant's curve along an axis, over the range that all of its seeds cover."""
    found: dict[str, Band] = {}
    for variant in dict.fromkeys(each.variant for each in outcomes):
        own = [each for each in outcomes if each.variant == variant]
        first = max(getattr(each.curve, axis)[0] for each in own)
        last = min(getattr(each.curve, axis)[-1] for each in own)
        places = np.linspace(first, max(first, last), POINTS)
        found[variant] = Band(places, *success_band(counts_at(own, axis, places)))
    return found


def to_json(comparison: Comparison, reported: Sequence[ReportedRun]) -> dict[str, Any]:
    """Return all results as a JSON-serialisable dictionary."""
    runs = [asdict(each.outcome) | {"commit": each.commit, "machine": each.machine} for each in reported]
    for run in runs:
        # JSON has no NaN: what was not measured is left out.
        run["curve"] = {name: values.tolist() for name, values in run["curve"].items() if np.isfinite(values).all()}
    return {
        "measured": comparison.measured,
        "level": LEVEL,
        "budgets": comparison.budgets,
        "variants": [
            asdict(row) | {"played": [asdict(each) | each.shares() for each in row.played]} for row in comparison.rows
        ],
        "contrasts": [asdict(each) for each in comparison.contrasts],
        "runs": runs,
    }


def plot_name(axis: str) -> str:
    return f"success-{axis.replace('_', '-')}.svg"


def _row(own: Sequence[RunOutcome], budgets: Mapping[str, float]) -> ComparisonRow:
    finals, starts = counts_of([each.final for each in own]), counts_of([each.start for each in own])
    collapses = [each.collapsed for each in own if each.collapsed is not None]
    return ComparisonRow(
        variant=own[0].variant,
        seeds=tuple(each.seed for each in own),
        final=success_interval(finals),
        start=success_interval(starts),
        improvement=difference_interval(finals, starts),
        at_equal_cost={
            axis: success_interval(counts_at(own, axis, np.array(budget))) for axis, budget in budgets.items()
        },
        ess_mean=_mean_known([each.ess_mean for each in own]),
        ess_min=min((each.ess_min for each in own if each.ess_min is not None), default=None),
        staleness_mean=_mean_known([each.staleness_mean for each in own]),
        staleness_max=max((each.staleness_max for each in own if each.staleness_max is not None), default=None),
        truncated_share=_mean_known([each.truncated_share for each in own]),
        collapsed=sum(collapses) if collapses else None,
        gave_up=sum(each.gave_up for each in own),
        environment_steps=float(np.mean([each.environment_steps for each in own])),
        generated_tokens=float(np.mean([each.generated_tokens for each in own])),
        wall_s=float(np.mean([each.wall_s for each in own])),
        played=add_up(part for each in own for part in each.played),
    )


def _mean_known(values: Sequence[float | None]) -> float | None:
    return mean([value for value in values if value is not None])
