"""The comparison of a study's variants: intervals for each variant, and the report in JSON and Markdown.

Place in the flow: outcomes of finished runs → **comparison** → `results.json`, `report.md`, and the bands that
`plots.py` draws.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from horizonrl.common.statistics import mean
from horizonrl.ops.evaluation.report import markdown_table
from horizonrl.ops.studies.contrasts import (
    END,
    Contrast,
    CostRatio,
    EndCost,
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
from horizonrl.ops.terminal.figures import number

_table = partial(markdown_table, words=1)

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


def to_markdown(
    study: Study,
    comparison: Comparison,
    facts: Mapping[str, str],
    failures: Mapping[str, str],
    sections: Sequence[str] = (),
) -> str:
    """Return the report: what was run, the tables, sections of their own, the plots, and how failed runs ended."""
    parts = [f"# {study.name}", "\n".join(f"- {name}: {value}" for name, value in facts.items())]
    parts += [_method(comparison), _table(*_successes(comparison)), _table(*_costs(comparison))]
    parts += [f"## At equal cost\n\n{_table(*_equal_cost(comparison))}"]
    if comparison.contrasts:
        parts += [f"## Contrasts\n\n{CONTRASTS}\n\n{_table(*_contrasts(comparison))}"]
    if any(row.played for row in comparison.rows):
        parts += [f"## Training episodes by horizon\n\n{PLAYED}\n\n{_table(*_played(comparison))}"]
    parts += [
        *sections,
        "## Curves",
        *(f"![success against {AXES[axis]}]({plot_name(axis)})" for axis in ("steps", *comparison.budgets)),
    ]
    if failures:
        ends = [f"{name}:\n\n```\n{lines}\n```" for name, lines in failures.items()]
        parts += ["## Failed runs", *ends]
    return "\n\n".join(parts) + "\n"


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


def _method(comparison: Comparison) -> str:
    return (
        f"Success is that of {comparison.measured}. `end` is the last evaluation, or the last fifth of the RL steps "
        "if a run has no evaluations; `start` is the evaluation before the first step, or the first tenth of the "
        f"steps. Brackets hold the {LEVEL:.0%} interval of the mean over seeds (bootstrap of seeds, then episodes), "
        "not corrected for the number of comparisons. \\* marks an interval that excludes zero. A run that gave up, "
        "because no group had anything to learn from, counts with its success in that step."
    )


CONTRASTS = (
    "The first arm minus the second, over the seeds that both have, in points. `t` is Student's interval of the same "
    "difference over the paired seeds, and `p` its test: at few seeds, trust these. The p of a primary contrast is "
    "that of one test; the others are corrected together for each place (Holm). `cost` is what the first arm pays for "
    "the success that the second one has there, as a share of what that one pays; `never` means not within the budget. "
    "`to the end` is what the first arm spends until it has the lower one of the two ends, against what the second one "
    "spends until then, and the first as a share of the second."
)


def _successes(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    rows = [
        [row.variant, str(len(row.seeds)), _share(row.start), _share(row.final), _points(row.improvement)]
        for row in comparison.rows
    ]
    return ["variant", "seeds", "start", "end", "gain in points"], rows


def _contrasts(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    head = ["contrast", "at", "seeds", "difference", "t", "p", "cost", "to the end", "p of collapses"]
    rows = []
    for each in comparison.contrasts:
        within = "-" if each.tested is None else _bounds(each.tested.interval)
        place = "the end" if each.axis == END else f"{each.budget:,.0f} {AXES[each.axis]}"
        rows.append(
            [
                f"{each.variant} − {each.against}{' (primary)' if each.primary else ''}",
                place,
                str(len(each.seeds)),
                _points(each.difference),
                within,
                number(each.p, 3),
                "-" if each.cost is None else _ratio(each.cost),
                "-" if each.end_cost is None else _end_cost(each.end_cost),
                number(each.collapse_p, 3),
            ]
        )
    return head, rows


def _costs(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    head = ["variant", "ESS mean", "ESS min", "staleness mean", "staleness max", "truncated", "collapsed", "gave up"]

    rows = [
        [
            row.variant,
            number(row.ess_mean),
            number(row.ess_min),
            number(row.staleness_mean),
            number(row.staleness_max, 0),
            "-" if row.truncated_share is None else f"{row.truncated_share:.0%}",
            "-" if row.collapsed is None else f"{row.collapsed} of {len(row.seeds)}",
            f"{row.gave_up} of {len(row.seeds)}",
            f"{row.environment_steps:,.0f}",
            f"{row.generated_tokens:,.0f}",
            f"{row.wall_s / 60:.1f}",
        ]
        for row in comparison.rows
    ]
    return [*head, "environment steps", "generated tokens", "minutes"], rows


PLAYED = (
    "Valid episodes that the RL steps of all seeds consumed. `context` is the share that the context ended, before the "
    "horizon could. `turns` are means over solved and over unsolved episodes, and `repeated` is the share of turns in "
    "unsolved episodes that said what an earlier turn of theirs had said."
)


def _played(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    head = ["variant", "horizon", "episodes", "solved", "truncated", "context", "turns: solved", "unsolved", "repeated"]
    rows = []
    for row in comparison.rows:
        for each in row.played:
            shares = each.shares()
            rows.append(
                [
                    row.variant,
                    str(each.horizon),
                    f"{each.episodes:,}",
                    _percent(shares["solved_share"]),
                    _percent(shares["truncated_share"]),
                    _percent(shares["context_share"]),
                    number(shares["turns_per_solved"], 1),
                    number(shares["turns_per_unsolved"], 1),
                    _percent(shares["repeated_share"]),
                ]
            )
    return head, rows


def _equal_cost(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    head = [f"success at {budget:,.0f} {AXES[axis]}" for axis, budget in comparison.budgets.items()]
    rows = [[row.variant, *map(_share, row.at_equal_cost.values())] for row in comparison.rows]
    return ["variant", *head], rows


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _share(interval: Interval) -> str:
    return f"{100 * interval.mean:.1f} % [{100 * interval.low:.1f}, {100 * interval.high:.1f}]"


def _points(interval: Interval) -> str:
    star = " \\*" if interval.excludes_zero else ""
    return f"{100 * interval.mean:+.1f} {_bounds(interval)}{star}"


def _bounds(interval: Interval) -> str:
    return f"[{100 * interval.low:+.1f}, {100 * interval.high:+.1f}]"


def _ratio(cost: CostRatio) -> str:
    ratio, low, high = ("never" if value is None else f"{value:.2f}" for value in (cost.ratio, cost.low, cost.high))
    return f"{ratio} [{low}, {high}]"


def _end_cost(cost: EndCost) -> str:
    ratio, low, high = ("-" if value is None else f"{value:.2f}" for value in (cost.ratio, cost.low, cost.high))
    return f"{cost.spent:,.0f} against {cost.against_spent:,.0f}: {ratio} [{low}, {high}]"
