"""The curves of the page: series against the optimizer step, of the whole run and of each environment."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import methodcaller
from typing import Any, NamedTuple

from horizonrl.common.quantities import OWN, QUANTITIES
from horizonrl.common.statistics import mean, wilson
from horizonrl.common.types import Phase
from horizonrl.ops.rundir.files import Line, Stage

MAX_POINTS = 400
"""Points of a curve: in a longer run several steps are averaged into one, since a screen shows no more."""
MAX_ENVIRONMENTS = 6
"""Environments with a curve of their own: there are no more colours that a reader can tell apart."""

Fold = Callable[[list[Any]], Any]
AXES = {
    "success_rate": ("percent", "share of the episodes"),
    "reward_mean": ("number", "return of an episode"),
    "horizon": ("turns", "turns allowed"),
    "truncated_share": ("percent", "share of the episodes"),
    "turns_mean": ("turns", "turns of an episode"),
    "groups_trained": ("groups", "groups per step"),
    "staleness_mean": ("versions", "versions behind"),
    "logprob_gap": ("nats", "nats per token"),
    "kl": ("nats", "nats per token"),
    "ess": ("ratio", "share of the tokens"),
    "importance_mean": ("ratio", "ratio"),
    "clip_share": ("percent", "share of the tokens"),
    "entropy": ("nats", "nats per token"),
    "loss": ("number", "loss"),
    "grad_norm": ("number", "norm before clipping"),
    "generated_tokens_per_s": ("tokens/s", "tokens per second"),
    "step_s": ("seconds", "seconds per step"),
    "weights_bytes": ("bytes", "size of a version"),
}
"""The quantities that have a curve, in reading order: unit and axis."""
TO_ONE = ("success_rate", "ess")
"""Quantities whose axis ends at 1."""
OFF_ZERO = ("kl", "ess", "importance_mean", "loss")
"""Quantities whose axis need not begin at 0."""
OVERLAID = (
    *(
        "reward_mean",
        "turns_mean",
        "truncated_share",
        "horizon",
        "staleness_mean",
        "logprob_gap",
        "kl",
        "ess",
    ),
    *("entropy", "grad_norm", "generated_tokens_per_s", "step_s"),
)
"""Quantities that are drawn for several runs at once, besides success."""
BY_ENVIRONMENT = {"reward_mean": "return", "truncated_share": "share", "turns_mean": "mean"}
"""Quantities that each environment has a series of, with the name of the whole run's series."""


class Source(NamedTuple):
    """Where a series comes from."""

    name: str
    key: str
    fold: Fold = mean
    with_imitation: bool = False
    """Otherwise demonstrations are left out: they say nothing of the policy."""


SOURCES = {
    "groups_trained": (
        Source("trained", "groups_trained", with_imitation=True),
        Source("dropped", "groups_dropped", with_imitation=True),
    ),
    "staleness_mean": (Source("mean", "staleness_mean"), Source("largest", "staleness_max", max)),
    "logprob_gap": (
        Source("all tokens", "logprob_gap"),
        Source("same version", "logprob_gap_fresh"),
    ),
    "kl": (
        Source("from the policy that sampled", "kl"),
        Source("from the reference", "reference_kl"),
    ),
    "ess": (Source("share", "ess"),),
    "importance_mean": (
        Source("mean", "importance_mean"),
        Source("largest", "importance_max", max),
    ),
    "clip_share": (Source("share", "clip_share"),),
    "entropy": (Source("of a token", "entropy"),),
    "loss": (Source("loss", "loss", with_imitation=True),),
    "grad_norm": (Source("norm", "grad_norm", with_imitation=True),),
    "generated_tokens_per_s": (
        Source("generated", "generated_tokens_per_s"),
        Source("trained", "train_tokens_per_s", with_imitation=True),
    ),
    "step_s": (
        Source("training", "step_s", with_imitation=True),
        Source("waiting for groups", "wait_s", with_imitation=True),
    ),
    "weights_bytes": (Source("a version", "weights_bytes", with_imitation=True),),
}
"""The series of the other quantities."""


def curves(
    lines: Sequence[Line], evals: Sequence[Line], stages: Sequence[Stage] = ()
) -> list[dict[str, Any]]:
    """Return the curves that have points, in reading order. The evaluations of `stages` are named in the first."""
    if not lines:
        return []
    envs = _environments(lines)
    drawn = [_curve(quantity, _run_series(quantity, lines, envs)) for quantity in AXES]
    labels = {stage.line["version"]: str(stage) for stage in stages}
    points = [
        {
            "version": line["version"],
            "value": line["success_rate"],
            "low": line["low"],
            "high": line["high"],
        }
        | {"label": labels.get(line["version"])}
        for line in evals
    ]
    drawn[0] |= {"wide": True, "evaluations": points}
    drawn += _own_curves(_rl(lines))
    return [curve for curve in drawn if curve["series"] or curve.get("evaluations")]


def _own_curves(rl: Sequence[Line]) -> list[dict[str, Any]]:
    """Return a curve for each number that a loss of another package measures."""
    names = dict.fromkeys(name for line in rl for name in line if name.startswith(OWN))
    shape = {
        "unit": "number",
        "axis": "mean over tokens",
        "high": None,
        "zero": False,
        "steps": False,
    }
    drawn: list[dict[str, Any]] = []
    for name in names:
        series = [_series("mean", rl, methodcaller("get", name), mean)]
        drawn.append({"title": name.removeprefix(OWN), "series": series, **shape})
    return [curve for curve in drawn if any(series["y"] for series in curve["series"])]


def _run_series(quantity: str, lines: Sequence[Line], envs: Sequence[str]) -> list[dict[str, Any]]:
    rl = _rl(lines)
    if quantity == "success_rate":
        return [_success(rl, env) for env in (None, *envs)]
    if quantity == "horizon":
        return [_series(env, rl, _horizon(env), max) for env in envs or _only(lines)]
    if quantity in BY_ENVIRONMENT:
        name = BY_ENVIRONMENT[quantity]
        return [_series(env or name, rl, _value(quantity, env), mean) for env in (None, *envs)]
    return [
        _series(
            source.name, lines if source.with_imitation else rl, _value(source.key), source.fold
        )
        for source in SOURCES[quantity]
    ]


class NamedRun(NamedTuple):
    """A run among several on one page."""

    name: str
    colour: int
    metrics: Sequence[Line]
    evals: Sequence[Line]


def overlaid(runs: Sequence[NamedRun]) -> list[dict[str, Any]]:
    """Return curves with a series per run: success on held-out tasks and in training with intervals, and the rest."""
    rl = [(run.name, run.colour, _rl(run.metrics)) for run in runs]
    held_out = [_held_out(run.name, run.evals) | {"colour": run.colour} for run in runs]
    training = [
        _success(lines, None) | {"name": name, "colour": colour} for name, colour, lines in rl
    ]
    drawn = [
        _curve("success_rate", held_out) | {"title": "Held-out success"},
        _curve("success_rate", training) | {"title": "Success in training"},
    ]
    for quantity in OVERLAID:
        value = _value(quantity)
        series = [
            _series(name, lines, value, mean) | {"colour": colour} for name, colour, lines in rl
        ]
        drawn.append(_curve(quantity, series))
    return [
        curve | {"wide": index < 2, "bands": True}
        for index, curve in enumerate(drawn)
        if curve["series"]
    ]


def _held_out(name: str, evals: Sequence[Line]) -> dict[str, Any]:
    points = sorted(
        (line for line in evals if line["success_rate"] is not None),
        key=lambda line: line["version"],
    )
    keys = {"x": "version", "y": "success_rate", "low": "low", "high": "high"}
    return {"name": name, **{axis: [line[key] for line in points] for axis, key in keys.items()}}


def _rl(lines: Sequence[Line]) -> list[Line]:
    return [line for line in lines if line["phase"] == Phase.RL.value]


def _environments(lines: Sequence[Line]) -> list[str]:
    """Return the environments with curves of their own: the most played ones; none if there is only one."""
    played: Counter[str] = Counter()
    for line in lines:
        played.update({env: outcome["episodes"] for env, outcome in line["environments"].items()})
    return [env for env, _ in played.most_common(MAX_ENVIRONMENTS)] if len(played) > 1 else []


def _only(lines: Sequence[Line]) -> list[str]:
    return sorted({env for line in lines for env in line["horizons"]})[:1]


def _curve(quantity: str, series: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a curve under the title of its quantity, with the series that have points."""
    unit, axis = AXES[quantity]
    return {
        "title": QUANTITIES[quantity].curve,
        "unit": unit,
        "axis": axis,
        "series": [one for one in series if one["y"]],
        "high": 1.0 if quantity in TO_ONE else None,
        "zero": quantity not in OFF_ZERO,
        "steps": quantity == "horizon",
    }


def _series(
    name: str, lines: Sequence[Line], value_in: Callable[[Line], Any], fold: Fold
) -> dict[str, Any]:
    """Return a series with a point for each bin of steps that has a value."""
    series: dict[str, Any] = {"name": name, "x": [], "y": []}
    for part in _bins(lines):
        if values := [value for line in part if (value := value_in(line)) is not None]:
            series["x"].append(part[-1]["step"])
            series["y"].append(fold(values))
    return series


def _success(lines: Sequence[Line], env: str | None) -> dict[str, Any]:
    """Return the success of a bin's valid episodes with Wilson's interval; of all environments, or of one."""
    series: dict[str, Any] = {"name": env or "training", "x": [], "y": [], "low": [], "high": []}
    for part in _bins(lines):
        outcomes = [
            (
                _value("success_rate", env)(line),
                round((_value("episodes", env)(line) or 0) * (1 - (line["error_share"] or 0.0))),
            )
            for line in part
        ]
        trials = sum(valid for rate, valid in outcomes if rate is not None)
        if trials:
            # The journal has rates and shares, but Wilson's interval needs counts. Rounding may not make more successes
            # than trials.
            successes = min(
                trials, round(sum(rate * valid for rate, valid in outcomes if rate is not None))
            )
            low, high = wilson(successes, trials)
            point = {"x": part[-1]["step"], "y": successes / trials, "low": low, "high": high}
            for key, value in point.items():
                series[key].append(value)
    return series


def _bins(lines: Sequence[Line]) -> Iterator[Sequence[Line]]:
    size = -(-len(lines) // MAX_POINTS) or 1
    return (lines[start : start + size] for start in range(0, len(lines), size))


def _value(key: str, env: str | None = None) -> Callable[[Line], Any]:
    if env is None:
        return lambda line: line[key]
    return lambda line: line["environments"].get(env, {}).get(key)


def _horizon(env: str) -> Callable[[Line], Any]:
    return lambda line: line["horizons"].get(env)
