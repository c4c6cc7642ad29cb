"""The comparison of a study's variants: intervals for each variant, and the report in JSON and Markdown.

Place in the flow: outcomes of finished runs → **comparison** → `results.json`, `report.md`, and the bands that
`plots.py` draws.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from horizonrl.common.statistics import mean
from horizonrl.ops.bench.learning.outcome import RunOutcome, Success
from horizonrl.ops.bench.learning.significance import PairedTest, holm, paired_test
from horizonrl.ops.bench.learning.statistics import (
    LEVEL,
    Array,
    Counts,
    Interval,
    difference_interval,
    success_band,
    success_interval,
)
from horizonrl.ops.bench.learning.study import Study

AXES = {
    "steps": "RL steps",
    "environment_steps": "environment steps",
    "generated_tokens": "generated tokens",
    "processed_tokens": "processed tokens",
    "seconds": "seconds of training",
}
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
    difference: Interval | None
    """Difference from the baseline over the seeds that both have; None for the baseline itself."""
    tested: PairedTest | None
    """The same by Student's t over the paired seeds; None for the baseline, and for a single seed."""
    p_holm: float | None
    """Its p, corrected for the number of variants that are compared with the baseline (Holm)."""
    at_equal_cost: dict[str, Interval]
    """Success at the largest budget that every run reached, for each axis except steps."""
    ess_mean: float | None
    ess_min: float | None
    staleness_mean: float | None
    staleness_max: float | None
    truncated_share: float | None
    collapsed: int
    """Number of seeds that collapsed (`outcome.collapses`)."""
    environment_steps: float
    generated_tokens: float
    wall_s: float


@dataclass(frozen=True, slots=True)
class Comparison:
    rows: Sequence[ComparisonRow]
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
    budgets = {
        axis: float(min(getattr(each.curve, axis)[-1] for each in outcomes))
        for axis in measured_axes(outcomes)
        if axis != "steps"
    }
    by_variant = {
        variant.name: sorted((each for each in outcomes if each.variant == variant.name), key=lambda each: each.seed)
        for variant in study.variants
    }
    baseline = by_variant.get(study.baseline or "", [])
    rows = _corrected([_row(own, baseline, budgets) for own in by_variant.values() if own])
    return Comparison(rows, budgets, " and ".join(sorted({each.measured for each in outcomes})))


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
        found[variant] = Band(places, *success_band(_counts_at(own, axis, places)))
    return found


def to_json(comparison: Comparison, outcomes: Sequence[RunOutcome], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return all results as a JSON-serialisable dictionary."""
    runs = [asdict(each) for each in outcomes]
    for run in runs:
        # JSON has no NaN: what was not measured is left out.
        run["curve"] = {name: values.tolist() for name, values in run["curve"].items() if np.isfinite(values).all()}
    return {
        **facts,
        "measured": comparison.measured,
        "level": LEVEL,
        "budgets": comparison.budgets,
        "variants": [asdict(row) for row in comparison.rows],
        "runs": runs,
    }


def to_markdown(study: Study, comparison: Comparison, facts: Mapping[str, str], failures: Mapping[str, str]) -> str:
    """Return the report: what was run, the tables, the plots, and the last lines of failed runs."""
    parts = [f"# {study.name}", "\n".join(f"- {name}: {value}" for name, value in facts.items())]
    parts += [_method(comparison), _table(*_successes(comparison, study)), _table(*_costs(comparison))]
    parts += [f"## At equal cost\n\n{_table(*_equal_cost(comparison))}"]
    parts += [
        "## Curves",
        *(f"![success against {AXES[axis]}]({plot_name(axis)})" for axis in ("steps", *comparison.budgets)),
    ]
    if failures:
        ends = [f"{name}:\n\n```\n{lines}\n```" for name, lines in failures.items()]
        parts += ["## Failed runs", *ends]
    return "\n\n".join(parts) + "\n"


def plot_name(axis: str) -> str:
    return f"success-{axis.replace('_', '-')}.svg"


def _row(own: Sequence[RunOutcome], baseline: Sequence[RunOutcome], budgets: Mapping[str, float]) -> ComparisonRow:
    finals, starts = _counts([each.final for each in own]), _counts([each.start for each in own])
    return ComparisonRow(
        variant=own[0].variant,
        seeds=tuple(each.seed for each in own),
        final=success_interval(finals),
        start=success_interval(starts),
        improvement=difference_interval(finals, starts),
        difference=_difference(own, baseline),
        tested=_tested(own, baseline),
        p_holm=None,
        at_equal_cost={
            axis: success_interval(_counts_at(own, axis, np.array(budget))) for axis, budget in budgets.items()
        },
        ess_mean=_mean_known([each.ess_mean for each in own]),
        ess_min=min((each.ess_min for each in own if each.ess_min is not None), default=None),
        staleness_mean=_mean_known([each.staleness_mean for each in own]),
        staleness_max=max((each.staleness_max for each in own if each.staleness_max is not None), default=None),
        truncated_share=_mean_known([each.truncated_share for each in own]),
        collapsed=sum(each.collapsed for each in own),
        environment_steps=float(np.mean([each.environment_steps for each in own])),
        generated_tokens=float(np.mean([each.generated_tokens for each in own])),
        wall_s=float(np.mean([each.wall_s for each in own])),
    )


def _corrected(rows: Sequence[ComparisonRow]) -> list[ComparisonRow]:
    """Return the rows with each p corrected for the number of comparisons."""
    tests = {row.variant: row.tested.p for row in rows if row.tested is not None}
    corrected = dict(zip(tests, holm(list(tests.values())), strict=True))
    return [replace(row, p_holm=corrected.get(row.variant)) for row in rows]


def _pairs(own: Sequence[RunOutcome], baseline: Sequence[RunOutcome]) -> list[tuple[Success, Success]]:
    """Return the ends of the seeds that a variant and the baseline both have; none for the baseline itself."""
    other = {each.seed: each for each in baseline if each.variant != own[0].variant}
    return [(each.final, other[each.seed].final) for each in own if each.seed in other]


def _tested(own: Sequence[RunOutcome], baseline: Sequence[RunOutcome]) -> PairedTest | None:
    pairs = _pairs(own, baseline)
    ours, theirs = (np.array([pair[side].successes / pair[side].episodes for pair in pairs]) for side in (0, 1))
    return paired_test(ours, theirs)


def _difference(own: Sequence[RunOutcome], baseline: Sequence[RunOutcome]) -> Interval | None:
    pairs = _pairs(own, baseline)
    if not pairs:
        return None
    return difference_interval(_counts([one for one, _ in pairs]), _counts([two for _, two in pairs]))


def _counts(measures: Sequence[Success]) -> Counts:
    return Counts(np.array([each.successes for each in measures]), np.array([each.episodes for each in measures]))


def _counts_at(own: Sequence[RunOutcome], axis: str, places: Array) -> Counts:
    """Return the counts of every run at places of an axis."""
    points = [each.curve.interpolate(axis, places) for each in own]
    return Counts(np.stack([k for k, _ in points]), np.stack([n for _, n in points]))


def _mean_known(values: Sequence[float | None]) -> float | None:
    return mean([value for value in values if value is not None])


def _method(comparison: Comparison) -> str:
    return (
        f"Success is that of {comparison.measured}. `end` is the last evaluation, or the last fifth of the RL steps "
        "if a run has no evaluations; `start` is the evaluation before the first step, or the first tenth of the "
        f"steps. Brackets hold the {LEVEL:.0%} interval of the mean over seeds (bootstrap of seeds, then episodes), "
        "not corrected for the number of comparisons. \\* marks an interval that excludes zero. `t` is Student's "
        "interval of the same difference over the paired seeds, and `p` its test, corrected for the number of variants "
        "(Holm): at few seeds, trust these."
    )


def _successes(comparison: Comparison, study: Study) -> tuple[list[str], list[list[str]]]:
    head = ["variant", "seeds", "start", "end", "gain in points"]
    head += [f"end against {study.baseline}", "t", "p"] if study.baseline else []
    rows = []
    for row in comparison.rows:
        cells = [row.variant, str(len(row.seeds)), _share(row.start), _share(row.final), _points(row.improvement)]
        rows.append(cells + (_against(row) if study.baseline else []))
    return head, rows


def _costs(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    head = ["variant", "ESS mean", "ESS min", "staleness mean", "staleness max", "truncated", "collapsed"]
    rows = [
        [
            row.variant,
            _number(row.ess_mean),
            _number(row.ess_min),
            _number(row.staleness_mean),
            _number(row.staleness_max, 0),
            "-" if row.truncated_share is None else f"{row.truncated_share:.0%}",
            f"{row.collapsed} of {len(row.seeds)}",
            f"{row.environment_steps:,.0f}",
            f"{row.generated_tokens:,.0f}",
            f"{row.wall_s / 60:.1f}",
        ]
        for row in comparison.rows
    ]
    return [*head, "environment steps", "generated tokens", "minutes"], rows


def _equal_cost(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    head = [f"success at {budget:,.0f} {AXES[axis]}" for axis, budget in comparison.budgets.items()]
    rows = [[row.variant, *map(_share, row.at_equal_cost.values())] for row in comparison.rows]
    return ["variant", *head], rows


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *rows))


def _share(interval: Interval) -> str:
    return f"{100 * interval.mean:.1f} % [{100 * interval.low:.1f}, {100 * interval.high:.1f}]"


def _points(interval: Interval | None) -> str:
    if interval is None:
        return "-"
    star = " \\*" if interval.excludes_zero else ""
    return f"{100 * interval.mean:+.1f} [{100 * interval.low:+.1f}, {100 * interval.high:+.1f}]{star}"


def _against(row: ComparisonRow) -> list[str]:
    """Return the cells of a variant's difference from the baseline."""
    interval = row.tested.interval if row.tested is not None else None
    within = "-" if interval is None else f"[{100 * interval.low:+.1f}, {100 * interval.high:+.1f}]"
    return [_points(row.difference), within, _number(row.p_holm, 3)]


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
