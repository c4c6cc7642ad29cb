"""The curves of the page: series against the optimizer step, of the whole run and of each environment."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from horizonrl.common.statistics import mean, wilson
from horizonrl.common.types import Phase

Line = dict[str, Any]

MAX_POINTS = 400
"""Of a curve: more steps than that are averaged, as a screen has no place for them."""
MAX_ENVIRONMENTS = 6
"""With a curve of their own: as many as there are colours to tell apart."""


def curves(lines: Sequence[Line], evals: Sequence[Line]) -> list[dict[str, Any]]:
    """Return the curves that have points, in reading order. What an expert did is in none that tells of the policy."""
    if not lines:
        return []
    rl = [line for line in lines if line["phase"] == Phase.RL.value]
    envs = _environments(lines)
    drawn = [*_outcomes(rl, envs, lines, evals), *_corrections(rl, lines), *_speeds(rl, lines)]
    return [curve for curve in drawn if curve["series"] or curve.get("evaluations")]


def _outcomes(
    rl: Sequence[Line], envs: Sequence[str], lines: Sequence[Line], evals: Sequence[Line]
) -> list[dict[str, Any]]:
    whole_and_each = (None, *envs)
    cuts = [_mean("share", rl, _of("truncated_share", env), env) for env in whole_and_each]
    turns = [_mean("mean", rl, _of("turns_mean", env), env) for env in whole_and_each]
    return [
        _curve("Success", "percent", "episodes solved", [_success(rl, env) for env in whole_and_each], high=1.0)
        | {"wide": True, "evaluations": [evaluation_point(line) for line in evals]},
        _curve(
            "Reward",
            "number",
            "return of an episode",
            [_mean("return", rl, _of("reward_mean", env), env) for env in whole_and_each],
        ),
        _curve(
            "Horizon",
            "turns",
            "turns allowed",
            [_largest(env, rl, _horizon(env)) for env in envs or _only(lines)],
            steps=True,
        ),
        _curve("Cut by a limit", "percent", "episodes cut", cuts),
        _curve("Turns", "turns", "turns of an episode", turns),
        _curve(
            "Groups",
            "groups",
            "groups per step",
            [_mean("trained", lines, _of("groups_trained")), _mean("dropped", lines, _of("groups_dropped"))],
        ),
    ]


def _corrections(rl: Sequence[Line], lines: Sequence[Line]) -> list[dict[str, Any]]:
    """Return how far the data was from the policy that it trained, and what training made of it."""
    return [
        _curve(
            "Staleness",
            "versions",
            "versions behind",
            [_mean("mean", rl, _of("staleness_mean")), _largest("largest", rl, _of("staleness_max"))],
        ),
        _curve(
            "Logprob gap",
            "nats",
            "nats per token",
            [
                _mean("all tokens", rl, _of("logprob_gap")),
                _mean("same version", rl, _of("logprob_gap_fresh")),
            ],
        ),
        _curve(
            "KL divergence",
            "nats",
            "nats per token",
            [
                _mean("from the policy that sampled", rl, _of("kl")),
                _mean("from the reference", rl, _of("reference_kl")),
            ],
            zero=False,
        ),
        _curve(
            "Effective sample size",
            "ratio",
            "share of the tokens",
            [_mean("share", rl, _of("ess"))],
            high=1.0,
            zero=False,
        ),
        _curve(
            "Importance ratio",
            "ratio",
            "ratio",
            [_mean("mean", rl, _of("importance_mean")), _largest("largest", rl, _of("importance_max"))],
            zero=False,
        ),
        _curve("Clip share", "percent", "tokens clipped", [_mean("share", rl, _of("clip_share"))]),
        _curve("Entropy", "nats", "nats per token", [_mean("of a token", rl, _of("entropy"))]),
        _curve("Loss", "number", "loss", [_mean("loss", lines, _of("loss"))], zero=False),
        _curve("Gradient norm", "number", "norm before clipping", [_mean("norm", lines, _of("grad_norm"))]),
    ]


def _speeds(rl: Sequence[Line], lines: Sequence[Line]) -> list[dict[str, Any]]:
    return [
        _curve(
            "Throughput",
            "tokens/s",
            "tokens per second",
            [
                _mean("generated", rl, _of("generated_tokens_per_s")),
                _mean("trained", lines, _of("train_tokens_per_s")),
            ],
        ),
        _curve(
            "Time of a step",
            "seconds",
            "seconds per step",
            [_mean("training", lines, _of("step_s")), _mean("waiting for groups", lines, _of("wait_s"))],
        ),
        _curve("Weights published", "bytes", "size of a version", [_mean("a version", lines, _of("weights_bytes"))]),
    ]


def _environments(lines: Sequence[Line]) -> list[str]:
    """Return the environments that have curves of their own: none of a single one, the most played of many."""
    played: Counter[str] = Counter()
    for line in lines:
        played.update({env: outcome["episodes"] for env, outcome in line["environments"].items()})
    return [env for env, _ in played.most_common(MAX_ENVIRONMENTS)] if len(played) > 1 else []


def _only(lines: Sequence[Line]) -> list[str]:
    return sorted({env for line in lines for env in line["horizons"]})[:1]


def _curve(
    title: str,
    unit: str,
    axis: str,
    series: Sequence[Line],
    *,
    high: float | None = None,
    zero: bool = True,
    steps: bool = False,
) -> dict[str, Any]:
    kept = [one for one in series if one["y"]]
    return {"title": title, "unit": unit, "axis": axis, "series": kept, "high": high, "zero": zero, "steps": steps}


def _mean(name: str, lines: Sequence[Line], of: Callable[[Line], Any], env: str | None = None) -> dict[str, Any]:
    return _series(env or name, lines, of, mean)


def _largest(name: str, lines: Sequence[Line], of: Callable[[Line], Any]) -> dict[str, Any]:
    return _series(name, lines, of, max)


def _series(
    name: str, lines: Sequence[Line], of: Callable[[Line], Any], fold: Callable[[list[Any]], Any]
) -> dict[str, Any]:
    """Return a series with a point for each bin of steps that has a value."""
    series: dict[str, Any] = {"name": name, "x": [], "y": []}
    for part in _bins(lines):
        if values := [value for line in part if (value := of(line)) is not None]:
            series["x"].append(part[-1]["step"])
            series["y"].append(fold(values))
    return series


def _success(lines: Sequence[Line], env: str | None) -> dict[str, Any]:
    """Return the success of a bin's valid episodes with Wilson's interval; of all environments, or of one."""
    series: dict[str, Any] = {"name": env or "training", "x": [], "y": [], "low": [], "high": []}
    for part in _bins(lines):
        outcomes = [
            (
                _of("success_rate", env)(line),
                round((_of("episodes", env)(line) or 0) * (1 - (line["error_share"] or 0.0))),
            )
            for line in part
        ]
        trials = sum(valid for rate, valid in outcomes if rate is not None)
        if trials:
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


def _of(key: str, env: str | None = None) -> Callable[[Line], Any]:
    if env is None:
        return lambda line: line[key]
    return lambda line: line["environments"].get(env, {}).get(key)


def _horizon(env: str) -> Callable[[Line], Any]:
    return lambda line: line["horizons"].get(env)


def evaluation_point(line: Line) -> dict[str, Any]:
    return {"version": line["version"], "value": line["success_rate"], "low": line["low"], "high": line["high"]}
