"""The outcome of a finished run: its success curve and its cost.

Place in the flow: run directory → **outcome** → `comparison.py`. Success comes from the evaluations if the run has any,
else from the episodes consumed in training. The cost covers training only, not the evaluations.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from horizonrl.common.run_dir import EVALS, METRICS
from horizonrl.common.statistics import mean
from horizonrl.common.types import Phase
from horizonrl.ops.rundir.files import evaluated_split
from horizonrl.ops.rundir.lines import read_lines
from horizonrl.ops.studies.played import Played, read_played
from horizonrl.ops.studies.statistics import Array
from horizonrl.ops.studies.tables import read_tables

START_SHARE, FINAL_SHARE, WINDOW_SHARE = 0.1, 0.2, 0.1
"""For runs without evaluations, as shares of the RL steps: the start, the end, and the window of the curve's mean."""

COLLAPSE_POINTS, COLLAPSE_ROUNDS = 0.15, 2
AXES = {
    "steps": "RL steps",
    "environment_steps": "environment steps",
    "generated_tokens": "generated tokens",
    "processed_tokens": "processed tokens",
    "seconds": "seconds of training",
}
"""What a curve goes along."""

Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Success:
    successes: float
    episodes: float


@dataclass(frozen=True, slots=True)
class Curve:
    """Success along a run: arrays with one entry per point. Costs count from the first RL step."""

    steps: Array
    environment_steps: Array
    generated_tokens: Array
    processed_tokens: Array
    """Prompts, generations and observations."""
    seconds: Array
    """Time of the RL steps and of waiting for their batches, without evaluations that outlast the last step."""
    successes: Array
    episodes: Array

    def interpolate(self, axis: str, places: Array) -> tuple[Array, Array]:
        """Return successes and episodes at places of an axis, linearly interpolated between the points."""
        along = getattr(self, axis)
        return np.interp(places, along, self.successes), np.interp(places, along, self.episodes)


@dataclass(frozen=True, slots=True)
class RunOutcome:
    variant: str
    seed: int
    start: Success
    final: Success
    curve: Curve
    split: str
    """Of the tasks that success is of: that of the evaluations, or `train`."""
    ess_mean: float | None
    ess_min: float | None
    staleness_mean: float | None
    staleness_max: float | None
    truncated_share: float | None
    gave_up: bool
    """Training ended because no group had anything to learn from."""
    collapsed: bool | None
    """Success was COLLAPSE_POINTS below its own best before in COLLAPSE_ROUNDS evaluations in a row, or that of the
    step in which the run gave up was below one half. None if there are too few evaluations to see that."""
    environment_steps: int
    generated_tokens: int
    wall_s: float
    played: tuple[Played, ...] = ()
    """Training episodes by horizon; empty for a run of a release that did not report them."""
    tables: Mapping[str, Any] = field(default_factory=dict)
    """The paper's 27 tasks `before` and `after` RL, if the study has them played: as `horizonrl eval` wrote them."""


def read_outcome(
    run_dir: Path,
    variant: str,
    seed: int,
    wall_s: float,
    gave_up: bool = False,
    at_end: float | None = None,
) -> RunOutcome | None:
    """Read a run directory. Returns None if it has no RL step.

    `gave_up` says that the run ended with NothingToLearn, and `at_end` with which success in training. That success
    is the end of its curve, unless its last version was evaluated: an evaluation from before a collapse would hide it.
    """
    lines = [line for line in read_lines(run_dir / METRICS) if line["phase"] == Phase.RL.value]
    if not lines:
        return None
    # A resumed learner may write a line again: the later one counts.
    by_step = {line["step"]: line for line in read_lines(run_dir / EVALS) if line["episodes"]}
    evals = [by_step[step] for step in sorted(by_step)]
    costs = {
        key: np.cumsum([line[key] for line in lines])
        for key in ("environment_steps", "generated_tokens", "processed_tokens")
    }
    costs["seconds"] = np.cumsum([line["step_s"] + line["wait_s"] for line in lines])
    if unseen := bool(evals) and at_end is not None and evals[-1]["step"] < lines[-1]["step"]:
        episodes = evals[-1]["episodes"]
        evals.append(
            {"step": lines[-1]["step"], "successes": at_end * episodes, "episodes": episodes}
        )
    start, final, curve = (
        _read_evaluations(evals, lines, costs) if evals else _read_training(lines, costs)
    )
    # A success in training is no evaluation, of which a fall takes two.
    evaluated = (curve.successes / curve.episodes)[: -1 if unseen else None]
    ess, staleness, oldest = (
        _select(lines, key) for key in ("ess", "staleness_mean", "staleness_max")
    )
    return RunOutcome(
        variant,
        seed,
        start,
        final,
        curve,
        split=evaluated_split(evals[0]) if evals else "train",
        ess_mean=mean(ess),
        ess_min=min(ess, default=None),
        staleness_mean=mean(staleness),
        staleness_max=max(oldest, default=None),
        truncated_share=_weigh(lines, "truncated_share"),
        gave_up=gave_up,
        collapsed=_has_collapsed(evaluated, gave_up, at_end),
        environment_steps=int(costs["environment_steps"][-1]),
        generated_tokens=int(costs["generated_tokens"][-1]),
        wall_s=wall_s,
        played=read_played(run_dir),
        tables=read_tables(run_dir),
    )


def _has_collapsed(rates: Array, gave_up: bool, at_end: float | None) -> bool | None:
    if gave_up and (rates[-1] if at_end is None else at_end) < 0.5:
        return True
    return collapses(rates) if gave_up or len(rates) > COLLAPSE_ROUNDS else None


def collapses(rates: Array) -> bool:
    """Return whether success fell by COLLAPSE_POINTS below its best so far, and was still there at the next points."""
    fallen = np.maximum.accumulate(rates) - rates >= COLLAPSE_POINTS - 1e-9
    ends = range(COLLAPSE_ROUNDS, len(fallen) + 1)
    return any(bool(fallen[end - COLLAPSE_ROUNDS : end].all()) for end in ends)


def _read_evaluations(
    evals: Sequence[Line], lines: Sequence[Line], costs: Mapping[str, Array]
) -> tuple[Success, Success, Curve]:
    """The start is the last evaluation before the first RL step; without one, the first evaluation."""
    before = lines[0]["step"] - 1
    from_start = [line for line in evals if line["step"] <= before][-1:]
    from_start += [line for line in evals if line["step"] > before]
    steps = np.array([max(line["step"] - before, 0) for line in from_start])
    spent = {
        key: np.concatenate([[0], cost])[np.minimum(steps, len(cost))]
        for key, cost in costs.items()
    }
    successes = np.array([line["successes"] for line in from_start], float)
    episodes = np.array([line["episodes"] for line in from_start], float)
    points = [Success(float(k), float(n)) for k, n in zip(successes, episodes, strict=True)]
    return points[0], points[-1], Curve(steps, successes=successes, episodes=episodes, **spent)


def _read_training(
    lines: Sequence[Line], costs: Mapping[str, Array]
) -> tuple[Success, Success, Curve]:
    """The curve is the mean over the last tenth of the steps up to each point, so that no point knows the future."""
    episodes = np.array([_valid_episodes(line) for line in lines])
    successes = np.array(
        [n * (line["success_rate"] or 0.0) for n, line in zip(episodes, lines, strict=True)]
    )
    count = len(lines)
    first, last, window = (
        math.ceil(share * count) for share in (START_SHARE, FINAL_SHARE, WINDOW_SHARE)
    )
    start = Success(float(successes[:first].sum()), float(episodes[:first].sum()))
    final = Success(float(successes[-last:].sum()), float(episodes[-last:].sum()))
    curve = Curve(
        np.arange(1.0, count + 1),
        successes=_trailing(successes, window),
        episodes=_trailing(episodes, window),
        **costs,
    )
    return start, final, curve


def _valid_episodes(line: Line) -> float:
    # A broken episode has no success to count (invariants: Broken is not zero). The journal has the share of these.
    return float(round(line["episodes"] * (1 - (line["error_share"] or 0.0))))


def _trailing(values: Array, window: int) -> Array:
    """Return, for each entry, the sum of the `window` entries that end with it."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    return np.asarray(total[ends] - total[np.maximum(ends - window, 0)])


def _select(lines: Sequence[Line], key: str) -> list[float]:
    return [line[key] for line in lines if line[key] is not None]


def _weigh(lines: Sequence[Line], key: str) -> float | None:
    """Return the mean of a share over the steps, each weighted by its episodes."""
    pairs = [(line[key], _valid_episodes(line)) for line in lines if line[key] is not None]
    episodes = sum(count for _, count in pairs)
    return sum(value * count for value, count in pairs) / episodes if episodes else None
