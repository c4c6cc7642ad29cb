"""The contrasts of a study: two arms, seed by seed, at the end and at equal cost.

Place in the flow: outcomes of finished runs → **contrasts** → `comparison.py`. Axes: S seeds, R resamples, P places
along a cost.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horizonrl.ops.studies.outcome import RunOutcome, Success
from horizonrl.ops.studies.significance import PairedTest, fisher_exact, holm, paired_test
from horizonrl.ops.studies.statistics import (
    LEVEL,
    RESAMPLES,
    Array,
    Counts,
    Interval,
    difference_interval,
)
from horizonrl.ops.studies.study import Pair

END = "end"
"""The axis of the comparison of ends, at equal RL steps."""
PLACES = 400
"""Number of places at which the cost of equal success is looked for."""


@dataclass(frozen=True, slots=True)
class EndCost:
    """The cost after which each arm first has the success that both have in the end.

    That is the lower one of their two ends, however much each of them spends in all. `ratio` is `spent` as a share of
    `against_spent`, bounded by `low` and `high` at LEVEL, by bootstrap; None: the other arm has had it from the start.
    """

    success: float
    spent: float
    against_spent: float
    ratio: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class Contrast:
    """One arm minus the other, over the seeds that both have."""

    variant: str
    against: str
    primary: bool
    axis: str
    """`end`, or the cost that is equal."""
    budget: float | None
    """The most that every run of the two arms spent; None at the end."""
    seeds: tuple[int, ...]
    difference: Interval
    tested: PairedTest | None
    """The same by Student's t over the paired seeds; None if they show no spread, as one seed cannot."""
    p: float | None
    """Its p. Those of all contrasts but the primary ones are corrected together, for each axis (Holm)."""
    end_cost: EndCost | None
    """Along the axis, to what both have in the end; None at the end."""
    collapse_p: float | None
    """Fisher's exact test of the numbers of collapsed runs, at the end only; None if a collapse could not be seen."""


def contrasts(
    pairs: Sequence[Pair],
    outcomes: Sequence[RunOutcome],
    axes: Sequence[str],
    primary_axis: str | None = None,
) -> list[Contrast]:
    """Return every contrast whose arms share a seed: at the end, then at equal cost for each axis.

    `primary_axis` is the one on which the primary pairs are primary; None: all of them.
    """
    runs: dict[str, dict[int, RunOutcome]] = {}
    for outcome in outcomes:
        runs.setdefault(outcome.variant, {})[outcome.seed] = outcome
    contrasts_made: list[Contrast] = []
    for axis in (END, *axes):
        of_axis = [
            _contrast(pair, axis, runs[pair.variant], runs[pair.against])
            for pair in (
                pairs
                if primary_axis in (None, axis)
                else [replace(pair, primary=False) for pair in pairs]
            )
            if runs.get(pair.variant, {}).keys() & runs.get(pair.against, {}).keys()
        ]
        contrasts_made += _correct(of_axis)
    return contrasts_made


def least_budget(outcomes: Sequence[RunOutcome], axis: str) -> float:
    """Return the largest cost that every run reached.

    A run that gave up trains no further and costs no more: its success holds for any larger budget.
    """
    went_on = [outcome for outcome in outcomes if not outcome.gave_up] or outcomes
    return float(min(getattr(outcome.curve, axis)[-1] for outcome in went_on))


def count_successes(measures: Sequence[Success]) -> Counts:
    successes = np.array([measure.successes for measure in measures])
    return Counts(successes, np.array([measure.episodes for measure in measures]))


def counts_at(runs: Sequence[RunOutcome], axis: str, places: Array) -> Counts:
    """Return the counts of every run at places of an axis."""
    points = [outcome.curve.interpolate(axis, places) for outcome in runs]
    return Counts(np.stack([k for k, _ in points]), np.stack([n for _, n in points]))


def _contrast(
    pair: Pair, axis: str, ours: Mapping[int, RunOutcome], theirs: Mapping[int, RunOutcome]
) -> Contrast:
    seeds = sorted(ours.keys() & theirs.keys())
    one, other = ([arm[seed] for seed in seeds] for arm in (ours, theirs))
    budget = None if axis == END else least_budget([*one, *other], axis)
    if budget is None:
        after, before = (
            count_successes([outcome.final for outcome in arm]) for arm in (one, other)
        )
    else:
        after, before = (counts_at(arm, axis, np.array(budget)) for arm in (one, other))
    return Contrast(
        pair.variant,
        pair.against,
        pair.primary,
        axis,
        budget,
        tuple(seeds),
        difference_interval(after, before),
        tested := paired_test(after.rates, before.rates),
        None if tested is None else tested.p,
        None if budget is None else end_cost(one, other, axis),
        _collapse_p(one, other) if axis == END else None,
    )


def end_cost(ours: Sequence[RunOutcome], theirs: Sequence[RunOutcome], axis: str) -> EndCost:
    """Return what both arms spend until they have what both reach.

    Each resample draws seeds, the same for both arms, and then every evaluation's episodes again.
    """
    generator = np.random.default_rng(0)
    drawn_RS = generator.integers(0, len(ours), (RESAMPLES, len(ours)))
    arms = (ours, theirs)
    ends = [least_budget(arm, axis) for arm in arms]
    places = [np.linspace(0.0, end, PLACES) for end in ends]
    resampled = [
        _curves(arm, axis, at_P, drawn_RS, generator)
        for arm, at_P in zip(arms, places, strict=True)
    ]
    measured = [
        counts_at(arm, axis, at_P).rates.mean(0)[None]
        for arm, at_P in zip(arms, places, strict=True)
    ]
    goal, (spent, against_spent) = _spend(measured, ends)
    _, (ours_R, theirs_R) = _spend(resampled, ends)
    # A resample in which the other arm spent nothing has no ratio: it stands at the upper end.
    ratios_R = np.sort(
        np.divide(ours_R, theirs_R, out=np.full_like(ours_R, np.inf), where=theirs_R > 0)
    )
    low, high = (
        ratios_R[round(share * (RESAMPLES - 1))] for share in ((1 - LEVEL) / 2, (1 + LEVEL) / 2)
    )
    ratio = float(spent[0] / against_spent[0]) if against_spent[0] > 0 else None
    bounds = (float(value) if np.isfinite(value) else None for value in (low, high))
    return EndCost(float(goal[0]), float(spent[0]), float(against_spent[0]), ratio, *bounds)


def _spend(curves: Sequence[Array], ends: Sequence[float]) -> tuple[Array, list[Array]]:
    """Return the lower of the two ends [R] of each pair of curves [R, P], and what each spends until it has it."""
    goals_R = np.minimum(*(curves_RP[:, -1] for curves_RP in curves))
    return goals_R, [
        end * _find_reach(curves_RP, goals_R) for curves_RP, end in zip(curves, ends, strict=True)
    ]


def _curves(
    arm: Sequence[RunOutcome],
    axis: str,
    places_P: Array,
    drawn_RS: NDArray[np.integer[Any]],
    generator: np.random.Generator,
) -> Array:
    """Return the mean curve [R, P] of each resample. Its evaluations are drawn again, and not the places between."""
    total_RP = np.zeros((len(drawn_RS), len(places_P)))
    for seed, outcome in enumerate(arm):
        along = getattr(outcome.curve, axis)
        counts = Counts(outcome.curve.successes, outcome.curve.episodes)
        # A seed that is drawn twice has its episodes drawn twice.
        for draw in range(drawn_RS.shape[1]):
            drawn_R = drawn_RS[:, draw] == seed
            places_RK = np.broadcast_to(np.arange(len(along)), (int(drawn_R.sum()), len(along)))
            rates_RK = counts.resample(places_RK, generator)
            if len(rates_RK):
                total_RP[drawn_R] += np.array(
                    [np.interp(places_P, along, rates_K) for rates_K in rates_RK]
                )
    return np.asarray(total_RP / len(arm))


def _find_reach(curves_RP: Array, goals_R: Array) -> Array:
    """Return the share of the way at which each curve first has its goal; infinity if it never has."""
    there_RP = curves_RP >= goals_R[:, None] - 1e-12
    share_R = there_RP.argmax(1) / (curves_RP.shape[1] - 1)
    return np.where(there_RP.any(1), share_R, np.inf)


def _collapse_p(one: Sequence[RunOutcome], other: Sequence[RunOutcome]) -> float | None:
    seen = [
        [outcome.collapsed for outcome in arm if outcome.collapsed is not None]
        for arm in (one, other)
    ]
    if len(seen[0]) < len(one) or len(seen[1]) < len(other):
        return None
    return fisher_exact(sum(seen[0]), len(seen[0]), sum(seen[1]), len(seen[1]))


def _correct(contrasts_made: Sequence[Contrast]) -> list[Contrast]:
    """Return the contrasts of one axis with their p corrected; that of a primary one is tested alone."""
    places = [
        index
        for index, contrast in enumerate(contrasts_made)
        if contrast.p is not None and not contrast.primary
    ]
    corrected = dict(
        zip(places, holm([contrasts_made[index].p or 0.0 for index in places]), strict=True)
    )
    return [
        replace(contrast, p=corrected.get(index, contrast.p))
        for index, contrast in enumerate(contrasts_made)
    ]
