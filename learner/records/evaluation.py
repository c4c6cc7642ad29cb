"""Evaluation during training: rounds of held-out tasks, played by the same actors and never trained on.

Place in the flow: Group → **result**, parallel to the batch. Eval tickets are numbered consecutively: ticket `number`
plays task `number % tasks` in round `number // tasks`, so the number of tickets issued shows which rounds have begun.
A round's line is written when its last ticket has ended. The results of open rounds are part of every checkpoint.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, takewhile
from typing import Any

import xxhash

from horizonrl.common.config.schedule import RunSchedule
from horizonrl.common.config.training import EvalSection
from horizonrl.common.metrics import Metrics
from horizonrl.common.statistics import mean, pass_at_k, wilson
from horizonrl.common.types import Episode, PolicyVersion, Record
from horizonrl.learner.controller.curriculum import EvalTask
from horizonrl.learner.intake.collector import EvalEnd


class EpisodeResult(Record):
    """What a result keeps of a valid episode."""

    success: bool
    episode_return: float
    turns: int
    truncated: bool
    tokens: int = 0
    """Generated tokens."""

    @classmethod
    def of(cls, episode: Episode) -> "EpisodeResult":
        return cls(
            success=episode.success,
            episode_return=episode.episode_return,
            turns=len(episode.turns),
            truncated=episode.stop.truncated,
            tokens=episode.generated_tokens,
        )


class Result(Record):
    """The outcome of one eval ticket."""

    sequence: int
    number: int
    how: str
    """`evaluated`, `void`, or the reason why it was dropped."""
    issued_at_version: PolicyVersion | None = None
    oldest_version: int | None = None
    newest_version: int | None = None
    broken: int = 0
    """Number of broken episodes; for a void, all of them."""
    episodes: tuple[EpisodeResult, ...] = ()

    @classmethod
    def of(cls, end: EvalEnd) -> "Result":
        group = end.group
        valid = () if group is None else group.valid_episodes
        lost = (
            0
            if end.ticket is None or end.how not in ("evaluated", "void")
            else end.ticket.group_size - len(valid)
        )
        return cls(
            sequence=end.sequence,
            number=end.number,
            how=end.how,
            issued_at_version=None if end.ticket is None else end.ticket.issued_at_version,
            oldest_version=group.oldest_version if group is not None and valid else None,
            newest_version=group.newest_version if group is not None and valid else None,
            broken=lost,
            episodes=tuple(map(EpisodeResult.of, valid)),
        )


Results = Sequence[tuple[EvalTask, Result]]
"""The results of one round, in the order of its tasks."""


def plan_digest(settings: EvalSection, tasks: Sequence[EvalTask]) -> str:
    """Return the digest of the evaluation's settings and tasks. It must stay the same in a run: a ticket's number alone
    decides which task it plays."""
    names = " ".join(f"{planned.task.env_id}/{planned.task.task_id}" for planned in tasks)
    # The tasks say of which split they are.
    sampling = settings.model_dump_json(exclude={"split"})
    return xxhash.xxh3_64_hexdigest(f"{sampling} {names}".encode())


class Rounds:
    """The results of the rounds that are not complete."""

    def __init__(
        self, tasks: Sequence[EvalTask], results: Iterable[Mapping[str, Any]] = ()
    ) -> None:
        self._tasks = tasks
        self._open: dict[int, list[Result]] = defaultdict(list)
        for result in map(Result.model_validate, results):
            self._open[result.number // len(tasks)].append(result)

    def add(self, end: EvalEnd) -> Results | None:
        """Take the end of an eval ticket; return the results of its round if that completes it."""
        if not self._tasks:  # evaluations are off
            return None
        number = end.number // len(self._tasks)
        self._open[number].append(Result.of(end))
        if len(self._open[number]) < len(self._tasks):
            return None
        # The log has them in the order in which they ended; tasks are matched by number.
        ended = sorted(self._open.pop(number), key=lambda result: result.number)
        return list(zip(self._tasks, ended, strict=True))

    def awaited(self, schedule: RunSchedule, ended: int, step: int) -> set[int]:
        """Return the versions whose evaluation is due at `step` but not complete.

        These are the versions in the schedule, and those that a slow controller has issued tickets for instead. All
        eval tickets below number `ended` have ended.
        """
        if not self._tasks:
            return set()
        steps = map(schedule.eval_step, range(ended // len(self._tasks), schedule.eval_rounds))
        open_results = chain.from_iterable(self._open.values())
        issued = {
            result.issued_at_version.version
            for result in open_results
            if result.issued_at_version is not None
        }
        return issued | set(takewhile(lambda due: due <= step, steps))

    def dump(self) -> list[dict[str, Any]]:
        """Return the open rounds as JSON-able values, for the constructor."""
        return [
            result.model_dump(mode="json") for results in self._open.values() for result in results
        ]


def evaluation_line(
    results: Results, schedule: RunSchedule, learner: PolicyVersion, settled_step: int
) -> dict[str, Any]:
    """Return a complete round's line of `evals.jsonl`.

    `step` and `version` are what was judged: the version at which the tickets were issued. The versions that sampled
    the episodes lie between `oldest_version` and `newest_version`. The round's last ticket ended during `settled_step`.
    """
    issued = [
        result.issued_at_version for _, result in results if result.issued_at_version is not None
    ]
    # Tickets of one round name several versions if the controller died between them: the oldest one is judged. Messages
    # that could not be decoded name none.
    policy = min(issued, key=lambda policy: (policy.version, policy.lineage), default=learner)
    phase, phase_step = schedule.phase(policy.version)
    by_env = _group_by(results, lambda task: task.task.env_id)
    oldest = [result.oldest_version for _, result in results if result.oldest_version is not None]
    newest = [result.newest_version for _, result in results if result.newest_version is not None]
    return {
        "step": policy.version,
        "version": policy.version,
        "phase": phase.value,
        "phase_step": phase_step,
        "lineage": policy.lineage,
        "time": time.time(),
        "settled_step": settled_step,
        "split": schedule.eval.split,
        "oldest_version": min(oldest, default=None),
        "newest_version": max(newest, default=None),
        **measures(results, schedule.eval.samples),
        "environments": {
            env_id: _by_category(part, schedule.eval.samples) for env_id, part in by_env.items()
        },
        "ends": [
            [result.sequence, f"eval-{result.number:08d}", result.how] for _, result in results
        ],
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
    """Set the Prometheus metrics from a round's line."""
    metrics.set("eval_version", line["version"])
    for env_id, measured in line["environments"].items():
        if measured["success_rate"] is not None:
            metrics.set("eval_success_rate", measured["success_rate"], env=env_id)


def _by_category(results: Results, samples: int) -> dict[str, Any]:
    categories = _group_by(results, lambda task: task.category)
    return measures(results, samples) | {
        "categories": {category: _success(part) for category, part in sorted(categories.items())}
    }


def measures(results: Results, samples: int) -> dict[str, Any]:
    """Return the measures over the valid episodes, with pass@k up to `samples`; None where there are no episodes."""
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
    """Return the mean pass@k over the tasks that have at least k valid episodes."""
    return mean(
        [
            pass_at_k(len(result.episodes), sum(episode.success for episode in result.episodes), k)
            for _, result in results
            if len(result.episodes) >= k
        ]
    )


def _group_by(
    results: Results, key: Callable[[EvalTask], str]
) -> dict[str, list[tuple[EvalTask, Result]]]:
    parts: dict[str, list[tuple[EvalTask, Result]]] = defaultdict(list)
    for task, result in results:
        parts[key(task)].append((task, result))
    return parts
