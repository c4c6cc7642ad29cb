"""The curves of the page: series against the optimizer step, of the whole run and of each environment."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from horizonrl.common.quantities import QUANTITIES
from horizonrl.common.statistics import mean, wilson
from horizonrl.common.types import Phase

Line = dict[str, Any]

MAX_POINTS = 400
"""Points of a curve: in a longer run several steps are averaged into one, since a screen shows no more."""
MAX_ENVIRONMENTS = 6
"""Environments with a curve of their own: there are no more colours that a reader can tell apart."""


def curves(lines: Sequence[Line], evals: Sequence[Line]) -> list[dict[str, Any]]:
    """Return the curves that have points, in reading order. Curves of the policy leave demonstrations out."""
    if not lines:
        return []
    rl = [line for line in lines if line["phase"] == Phase.RL.value]
    envs = _environments(lines)
    drawn = [*_outcomes(rl, envs, lines, evals), *_corrections(rl, lines), *_speeds(rl, lines)]
    return [curve for curve in drawn if curve["series"] or curve.get("evaluations")]


Named = tuple[str, int, Sequence[Line], Sequence[Line]]
"""A run's name, the number of its colour, and its lines of metrics and evaluations."""
OVERLAID: dict[str, tuple[str, str]] = {
    "reward_mean": ("number", "return of an episode"),
    "turns_mean": ("turns", "turns of an episode"),
    "truncated_share": ("percent", "share of the episodes"),
    "horizon": ("turns", "turns allowed"),
    "staleness_mean": ("versions", "versions behind"),
    "logprob_gap": ("nats", "nats per token"),
    "kl": ("nats", "nats per token"),
    "ess": ("ratio", "share of the tokens"),
    "entropy": ("nats", "nats per token"),
    "grad_norm": ("number", "norm before clipping"),
    "generated_tokens_per_s": ("tokens/s", "tokens per second"),
    "step_s": ("seconds", "seconds per step"),
}
"""Quantities that are drawn for several runs at once, with unit and axis, besides success."""


def overlaid(runs: Sequence[Named]) -> list[dict[str, Any]]:
    """Return curves with a series per run: success on held-out tasks and in training with intervals, and the rest."""
    rl = [
        (name, colour, [line for line in lines if line["phase"] == Phase.RL.value]) for name, colour, lines, _ in runs
    ]
    held_out = [_held_out(name, evals) | {"colour": colour} for name, colour, _, evals in runs]
    training = [_success(lines, None) | {"name": name, "colour": colour} for name, colour, lines in rl]
    drawn = [
        _curve("success_rate", "percent", "share of the episodes", held_out, high=1.0) | {"title": "Held-out success"},
        _curve("success_rate", "percent", "share of the episodes", training, high=1.0)
        | {"title": "Success in training"},
    ]
    for key, (unit, axis) in OVERLAID.items():
        series = [_mean(name, lines, key) | {"colour": colour} for name, colour, lines in rl]
        bounded = {"high": 1.0} if key == "ess" else {}
        drawn.append(_curve(key, unit, axis, series, zero=key not in ("kl", "ess"), steps=key == "horizon", **bounded))
    return [curve | {"wide": place < 2, "bands": True} for place, curve in enumerate(drawn) if curve["series"]]


def _held_out(name: str, evals: Sequence[Line]) -> dict[str, Any]:
    points = sorted((line for line in evals if line["success_rate"] is not None), key=lambda line: line["version"])
    keys = {"x": "version", "y": "success_rate", "low": "low", "high": "high"}
    return {"name": name, **{axis: [line[key] for line in points] for axis, key in keys.items()}}


def _outcomes(
    rl: Sequence[Line], envs: Sequence[str], lines: Sequence[Line], evals: Sequence[Line]
) -> list[dict[str, Any]]:
    whole_and_each = (None, *envs)
    truncated = [_mean("share", rl, "truncated_share", env) for env in whole_and_each]
    turns = [_mean("mean", rl, "turns_mean", env) for env in whole_and_each]
    return [
        _curve(
            "success_rate",
            "percent",
            "share of the episodes",
            [_success(rl, env) for env in whole_and_each],
            high=1.0,
        )
        | {"wide": True, "evaluations": [evaluation_point(line) for line in evals]},
        _curve(
            "reward_mean",
            "number",
            "return of an episode",
            [_mean("return", rl, "reward_mean", env) for env in whole_and_each],
        ),
        _curve(
            "horizon",
            "turns",
            "turns allowed",
            [_series(env, rl, _horizon(env), max) for env in envs or _only(lines)],
            steps=True,
        ),
        _curve("truncated_share", "percent", "share of the episodes", truncated),
        _curve("turns_mean", "turns", "turns of an episode", turns),
        _curve(
            "groups_trained",
            "groups",
            "groups per step",
            [_mean("trained", lines, "groups_trained"), _mean("dropped", lines, "groups_dropped")],
        ),
    ]


def _corrections(rl: Sequence[Line], lines: Sequence[Line]) -> list[dict[str, Any]]:
    """Return how far the data was from the policy in training, and what training made of it."""
    return [
        _curve(
            "staleness_mean",
            "versions",
            "versions behind",
            [_mean("mean", rl, "staleness_mean"), _largest("largest", rl, "staleness_max")],
        ),
        _curve(
            "logprob_gap",
            "nats",
            "nats per token",
            [
                _mean("all tokens", rl, "logprob_gap"),
                _mean("same version", rl, "logprob_gap_fresh"),
            ],
        ),
        _curve(
            "kl",
            "nats",
            "nats per token",
            [
                _mean("from the policy that sampled", rl, "kl"),
                _mean("from the reference", rl, "reference_kl"),
            ],
            zero=False,
        ),
        _curve(
            "ess",
            "ratio",
            "share of the tokens",
            [_mean("share", rl, "ess")],
            high=1.0,
            zero=False,
        ),
        _curve(
            "importance_mean",
            "ratio",
            "ratio",
            [_mean("mean", rl, "importance_mean"), _largest("largest", rl, "importance_max")],
            zero=False,
        ),
        _curve("clip_share", "percent", "share of the tokens", [_mean("share", rl, "clip_share")]),
        _curve("entropy", "nats", "nats per token", [_mean("of a token", rl, "entropy")]),
        _curve("loss", "number", "loss", [_mean("loss", lines, "loss")], zero=False),
        _curve("grad_norm", "number", "norm before clipping", [_mean("norm", lines, "grad_norm")]),
    ]


def _speeds(rl: Sequence[Line], lines: Sequence[Line]) -> list[dict[str, Any]]:
    return [
        _curve(
            "generated_tokens_per_s",
            "tokens/s",
            "tokens per second",
            [
                _mean("generated", rl, "generated_tokens_per_s"),
                _mean("trained", lines, "train_tokens_per_s"),
            ],
        ),
        _curve(
            "step_s",
            "seconds",
            "seconds per step",
            [_mean("training", lines, "step_s"), _mean("waiting for groups", lines, "wait_s")],
        ),
        _curve(
            "weights_bytes",
            "bytes",
            "size of a version",
            [_mean("a version", lines, "weights_bytes")],
        ),
    ]


def _environments(lines: Sequence[Line]) -> list[str]:
    """Return the environments with curves of their own: the most played ones; none if there is only one."""
    played: Counter[str] = Counter()
    for line in lines:
        played.update({env: outcome["episodes"] for env, outcome in line["environments"].items()})
    return [env for env, _ in played.most_common(MAX_ENVIRONMENTS)] if len(played) > 1 else []


def _only(lines: Sequence[Line]) -> list[str]:
    return sorted({env for line in lines for env in line["horizons"]})[:1]


def _curve(
    quantity: str,
    unit: str,
    axis: str,
    series: Sequence[Line],
    *,
    high: float | None = None,
    zero: bool = True,
    steps: bool = False,
) -> dict[str, Any]:
    """Return a curve under the title of its quantity, with the series that have points."""
    title = QUANTITIES[quantity].curve
    kept = [one for one in series if one["y"]]
    return {"title": title, "unit": unit, "axis": axis, "series": kept, "high": high, "zero": zero, "steps": steps}


def _mean(name: str, lines: Sequence[Line], key: str, env: str | None = None) -> dict[str, Any]:
    return _series(env or name, lines, _value(key, env), mean)


def _largest(name: str, lines: Sequence[Line], key: str) -> dict[str, Any]:
    return _series(name, lines, _value(key), max)


def _series(
    name: str, lines: Sequence[Line], value_of: Callable[[Line], Any], fold: Callable[[list[Any]], Any]
) -> dict[str, Any]:
    """Return a series with a point for each bin of steps that has a value."""
    series: dict[str, Any] = {"name": name, "x": [], "y": []}
    for part in _bins(lines):
        if values := [value for line in part if (value := value_of(line)) is not None]:
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
            successes = min(trials, round(sum(rate * valid for rate, valid in outcomes if rate is not None)))
            low, high = wilson(successes, trials)
            for key, value in zip(
                ("x", "y", "low", "high"), (part[-1]["step"], successes / trials, low, high), strict=True
            ):
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


def evaluation_point(line: Line) -> dict[str, Any]:
    return {"version": line["version"], "value": line["success_rate"], "low": line["low"], "high": line["high"]}
