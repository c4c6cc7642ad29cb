"""Evaluation during training: rounds of held-out tasks, played by the same actors and never trained on.

Place in the flow: Group → **result**, beside the batch. Eval tickets are numbered through: ticket `number` plays task
`number % tasks` in round `number // tasks`, so the count of tickets tells which rounds are out. A round's line is
written when its last ticket has ended. Results of open rounds are part of every checkpoint.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, takewhile
from typing import Any

import xxhash

from horizonrl.common.config.schema import RunConfig
from horizonrl.common.metrics import Metrics
from horizonrl.common.statistics import mean, pass_at_k, wilson
from horizonrl.common.types import Episode, PolicyVersion, Record
from horizonrl.learner.controller.curriculum import EvalTask
from horizonrl.learner.intake.collector import EvalEnd


class Played(Record):
    """A valid episode, as far as a result needs it."""

    success: bool
    episode_return: float
    turns: int
    truncated: bool
    tokens: int = 0
    """Generated."""

    @classmethod
    def of(cls, episode: Episode) -> "Played":
        return cls(
            success=episode.success,
            episode_return=episode.episode_return,
            turns=len(episode.turns),
            truncated=episode.stop.truncated,
            tokens=episode.generated_tokens,
        )


class Result(Record):
    """What one eval ticket came to."""

    sequence: int
    number: int
    how: str
    """`evaluated`, `void`, or the reason of a drop."""
    issued_at_version: PolicyVersion | None = None
    oldest_version: int | None = None
    newest_version: int | None = None
    broken: int = 0
    """Episodes that broke; all of them for a void."""
    episodes: tuple[Played, ...] = ()

    @classmethod
    def of(cls, end: EvalEnd) -> "Result":
        group = end.group
        valid = () if group is None else group.valid_episodes
        lost = 0 if end.ticket is None or end.how not in ("evaluated", "void") else end.ticket.group_size - len(valid)
        return cls(
            sequence=end.sequence,
            number=end.number,
            how=end.how,
            issued_at_version=None if end.ticket is None else end.ticket.issued_at_version,
            oldest_version=group.oldest_version if group is not None and valid else None,
            newest_version=group.newest_version if group is not None and valid else None,
            broken=lost,
            episodes=tuple(map(Played.of, valid)),
        )


Results = Sequence[tuple[EvalTask, Result]]
"""Of one round, in the order of its tasks."""


def plan_digest(config: RunConfig, tasks: Sequence[EvalTask]) -> str:
    """Return what must not change while a run goes on: tickets are told apart by their numbers alone."""
    named = " ".join(f"{of.task.env_id}/{of.task.task_id}" for of in tasks)
    return xxhash.xxh3_64_hexdigest(f"{config.eval.model_dump_json()} {named}".encode())


class Rounds:
    """The results of the rounds that are not complete."""

    def __init__(self, tasks: Sequence[EvalTask], results: Iterable[Mapping[str, Any]] = ()) -> None:
        self._tasks = tasks
        self._open: dict[int, list[Result]] = defaultdict(list)
        for result in map(Result.model_validate, results):
            self._open[result.number // len(tasks)].append(result)

    def add(self, end: EvalEnd) -> Results | None:
        """Take an eval ticket's end; return its whole round when that was the last one."""
        if not self._tasks:  # nobody ordered it
            return None
        number = end.number // len(self._tasks)
        self._open[number].append(Result.of(end))
        if len(self._open[number]) < len(self._tasks):
            return None
        ended = sorted(self._open.pop(number), key=lambda result: result.number)
        return list(zip(self._tasks, ended, strict=True))

    def awaited(self, config: RunConfig, ended: int, step: int) -> set[int]:
        """Return the versions whose evaluation is due at `step` and not in; all eval tickets below `ended` have ended.

        Those that the schedule names, and those that a slow controller has issued instead.
        """
        if not self._tasks:
            return set()
        steps = map(config.eval_step, range(ended // len(self._tasks), config.eval_rounds))
        open_results = chain.from_iterable(self._open.values())
        issued = {result.issued_at_version.version for result in open_results if result.issued_at_version is not None}
        return issued | set(takewhile(lambda due: due <= step, steps))

    def dump(self) -> list[dict[str, Any]]:
        """Return the open rounds as JSON-able values, for the constructor."""
        return [result.model_dump(mode="json") for results in self._open.values() for result in results]


def evaluation_line(results: Results, config: RunConfig, learner: PolicyVersion, settled_step: int) -> dict[str, Any]:
    """Return a complete round's line of `evals.jsonl`.

    `step` and `version` are those that were judged: the version that the tickets were issued under; `oldest_version`
    and `newest_version` really sampled. `settled_step` is the step in whose making the round's last ticket ended.
    """
    issued = [result.issued_at_version for _, result in results if result.issued_at_version is not None]
    policy = min(issued, key=lambda policy: (policy.version, policy.lineage), default=learner)
    phase, phase_step = config.phase(policy.version)
    by_env = _parted(results, lambda task: task.task.env_id)
    return {
        "step": policy.version,
        "version": policy.version,
        "phase": phase.value,
        "phase_step": phase_step,
        "lineage": policy.lineage,
        "time": time.time(),
        "settled_step": settled_step,
        "oldest_version": min((of.oldest_version for _, of in results if of.oldest_version is not None), default=None),
        "newest_version": max((of.newest_version for _, of in results if of.newest_version is not None), default=None),
        **measures(results, config.eval.samples),
        "environments": {env_id: _by_category(part, config.eval.samples) for env_id, part in by_env.items()},
        "ends": [[of.sequence, f"eval-{of.number:08d}", of.how] for _, of in results],
    }


def count_end(metrics: Metrics, end: EvalEnd) -> None:
    """Count an eval ticket's end in Prometheus."""
    if end.how == "evaluated":
        metrics.count("groups_evaluated_total")
    elif end.how == "void":
        metrics.count("groups_void_total")
    else:
        metrics.count("groups_dropped_total", reason=end.how)


def mirror_evaluation(metrics: Metrics, line: Mapping[str, Any]) -> None:
    """Set the Prometheus metrics of a round's line."""
    metrics.set("eval_version", line["version"])
    for env_id, measured in line["environments"].items():
        if measured["success_rate"] is not None:
            metrics.set("eval_success_rate", measured["success_rate"], env=env_id)


def _by_category(results: Results, samples: int) -> dict[str, Any]:
    categories = _parted(results, lambda task: task.category)
    return measures(results, samples) | {
        "categories": {category: _success(part) for category, part in sorted(categories.items())}
    }


def measures(results: Results, samples: int) -> dict[str, Any]:
    """Return what the valid episodes show, with pass@k up to `samples`; what none of them shows is None."""
    episodes = [episode for _, result in results for episode in result.episodes]
    return {
        **_success(results),
        "broken": sum(result.broken for _, result in results),
        "dropped": sum(result.how not in ("evaluated", "void") for _, result in results),
        "return_mean": mean([episode.episode_return for episode in episodes]),
        "turns_mean": mean([episode.turns for episode in episodes]),
        "tokens_mean": mean([episode.tokens for episode in episodes]),
        "truncated_share": mean([episode.truncated for episode in episodes]),
        "pass_at": {str(k): _pass_at(results, k) for k in range(1, samples + 1)},
    }


def _success(results: Results) -> dict[str, Any]:
    episodes = [episode for _, result in results for episode in result.episodes]
    successes = sum(episode.success for episode in episodes)
    low, high = wilson(successes, len(episodes))
    return {
        "episodes": len(episodes),
        "successes": successes,
        "success_rate": successes / len(episodes) if episodes else None,
        "low": low,
        "high": high,
    }


def _pass_at(results: Results, k: int) -> float | None:
    """Return the mean over the tasks that have at least k valid episodes."""
    return mean(
        [
            pass_at_k(len(result.episodes), sum(episode.success for episode in result.episodes), k)
            for _, result in results
            if len(result.episodes) >= k
        ]
    )


def _parted(results: Results, of: Callable[[EvalTask], str]) -> dict[str, list[tuple[EvalTask, Result]]]:
    parts: dict[str, list[tuple[EvalTask, Result]]] = defaultdict(list)
    for task, result in results:
        parts[of(task)].append((task, result))
    return parts
