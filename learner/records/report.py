"""What one step reports: its lines of `ledger.jsonl` and `metrics.jsonl`, and its mirror in Prometheus.

Reward, success and the like are measured on every group consumed for the step, not only on the trained ones. Without
the groups that have no variance, success would look closer to one half than it is. The cost includes the turns and
tokens of broken episodes. The lines of steps that were rolled back are cut, so a run's cost is the sum over its file.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from horizonrl.common.metrics import TABLE, Metrics
from horizonrl.common.quantities import OWN, QUANTITIES, Quantity
from horizonrl.common.statistics import mean
from horizonrl.common.types import Episode, Group, Kind, Phase, PolicyVersion, StopReason
from horizonrl.learner.algorithm.batch import Batch
from horizonrl.learner.controller.curriculum import DrawShare
from horizonrl.learner.engine.api import StepStats
from horizonrl.learner.intake.collector import PendingBatch


@dataclass(frozen=True, slots=True)
class TakenStep:
    """A committed step, as it was when it was committed: the next one is under way when its records are written."""

    phase: Phase
    policy: PolicyVersion
    """The version that it made."""
    cursor: int
    pending: PendingBatch
    batch: Batch
    stats: StepStats
    tickets_issued: int
    tickets_outstanding: int
    began_at: float
    """When its batch was full, in seconds since 1970."""
    wait_s: float


@dataclass(frozen=True, slots=True)
class StepTimes:
    wait_s: float
    step_s: float
    """From the full batch until the learner turned to the next one: training, and the beginning of a checkpoint."""
    publish_s: float
    """From the end of that training to the announced version, beside the next step."""
    weights_bytes: int
    ended_at: float
    """When `step_s` ended, in seconds since 1970."""


def ledger_line(
    policy: PolicyVersion, cursor: int, pending: PendingBatch, data_digest: str, weights_digest: str
) -> dict[str, Any]:
    """Return what the step that made `policy` consumed, and the digests that a replay must reproduce."""
    return {
        "step": policy.version,
        "version": policy.version,
        "lineage": policy.lineage,
        "cursor": cursor,
        "trained": [[sequence, group.ticket.ticket_id] for sequence, group in pending.admitted],
        "dropped": [[drop.sequence, drop.ticket_id, drop.reason.value] for drop in pending.dropped],
        "voids": [[sequence, ticket_id] for sequence, ticket_id in pending.voids],
        "actors": {group.ticket.ticket_id: group.provenance.actor for _, group in pending.admitted},
        "repeats": pending.repeats,
        "never_issued": pending.unissued,
        **({"holes": pending.holes} if pending.holes else {}),
        "data_digest": data_digest,
        "weights_digest": weights_digest,
    }


def metrics_line(
    phase: Phase, policy: PolicyVersion, pending: PendingBatch, stats: StepStats, times: StepTimes
) -> dict[str, Any]:
    """Return the step's line of `metrics.jsonl`, with a key for every quantity. What was not measured is None."""
    consumed = [group for group in pending.consumed if group.ticket.kind is phase.kind]
    episodes = [episode for group in consumed for episode in group.episodes]
    valid = [episode for episode in episodes if episode.valid]
    returns = [episode.episode_return for episode in valid]
    by_env = _by_env(consumed)
    horizons = {
        env: max(group.ticket.horizon_turns for group in groups) for env, groups in by_env.items()
    }
    trained = [group for _, group in pending.admitted]
    # From the version that was trained, one below the version that the step made.
    staleness = [
        policy.version - 1 - group.oldest_version
        for group in trained
        if group.ticket.kind is not Kind.DEMO
    ]
    generated = sum(episode.generated_tokens for episode in valid)
    line = {
        "phase": phase.value,
        "step": policy.version,
        "version": policy.version,
        "lineage": policy.lineage,
        "time": times.ended_at,
        "horizon": max(horizons.values(), default=0),
        "horizons": horizons,
        **_outcome(consumed),
        "environments": {env: _outcome(groups) for env, groups in by_env.items()},
        "return_std": float(np.std(returns)) if returns else None,
        "error_share": mean([float(episode.stop.broken) for episode in episodes]),
        "staleness_mean": mean(staleness),
        "staleness_max": max(staleness, default=None),
        "groups_trained": len(pending.admitted),
        "groups_dropped": len(pending.dropped),
        "durations": durations(pending),
        "tokens_trained": stats.trained_tokens,
        "train_tokens_per_s": stats.trained_tokens / stats.compute_s,
        "generated_tokens_per_s": generated / (times.wait_s + times.step_s),
        "weights_bytes": times.weights_bytes,
        "weights_publish_s": times.publish_s,
        "step_s": times.step_s,
        "wait_s": times.wait_s,
    }
    apart = ("trained_tokens", "compute_s", "numbers")
    measured = {key: value for key, value in asdict(stats).items() if key not in apart}
    # JSON has no NaN, which is how the engine says that there was nothing to measure.
    measured |= {f"{OWN}{name}": value for name, value in stats.numbers.items()}
    return line | {key: value if np.isfinite(value) else None for key, value in measured.items()}


def durations(pending: PendingBatch) -> dict[str, list[float]]:
    """Return the seconds that each train group took its actor, by how it ended: what is trained less often shows."""
    figures: dict[str, list[float]] = {}
    for group, end in pending.ends():
        if group.ticket.kind is Kind.TRAIN and group.finished_at_ms:  # an actor need not say it
            figures.setdefault(end, []).append(group.duration_s)
    return figures


LISTED = 16
"""Most entries of a step's `curriculum`: those with the largest shares. Prometheus has all."""


def drawn_from(shares: Sequence[DrawShare]) -> list[dict[str, Any]]:
    """Return what an adaptive curriculum draws after a step, the largest shares of all environments first."""
    return [asdict(share) for share in sorted(shares, key=lambda share: -share.share)[:LISTED]]


def _outcome(groups: Sequence[Group]) -> dict[str, Any]:
    """Return the results of the groups' valid episodes, and the cost of all their episodes."""
    episodes = [episode for group in groups for episode in group.episodes]
    valid = [episode for episode in episodes if episode.valid]
    return {
        "episodes": len(episodes),
        "success_rate": mean([float(episode.success) for episode in valid]),
        "reward_mean": mean([episode.episode_return for episode in valid]),
        "turns_mean": mean([len(episode.turns) for episode in valid]),
        "truncated_share": mean([float(episode.stop.truncated) for episode in valid]),
        "context_share": mean([float(episode.stop is StopReason.CONTEXT) for episode in valid]),
        "environment_steps": sum(len(episode.turns) for episode in episodes),
        "generated_tokens": sum(episode.generated_tokens for episode in episodes),
        "processed_tokens": sum(map(processed_tokens, episodes)),
    }


def processed_tokens(episode: Episode) -> int:
    """Return the tokens that a policy has read or written in an episode: prompts, generations and observations."""
    turns = sum(len(turn.output_ids) + len(turn.observation_ids) for turn in episode.turns)
    return (
        len(episode.prompt_ids) + sum(len(branch.prompt_ids) for branch in episode.branches) + turns
    )


def _by_env(groups: Sequence[Group]) -> dict[str, list[Group]]:
    env_ids = sorted({group.ticket.task.env_id for group in groups})
    return {env: [group for group in groups if group.ticket.task.env_id == env] for env in env_ids}


def mirror_metrics(metrics: Metrics, line: dict[str, Any], pending: PendingBatch) -> None:
    """Set the learner's Prometheus metrics from a step's line."""
    for _, group in pending.admitted:
        metrics.count("groups_trained_total", kind=group.ticket.kind.value)
        if group.ticket.kind is not Kind.DEMO:  # an expert has no version
            trained, oldest, newest = line["step"] - 1, group.oldest_version, group.newest_version
            metrics.observe("staleness_versions", trained - oldest, group.ticket.ticket_id)
            metrics.observe("staleness_in_flight_versions", newest - oldest)
            metrics.observe("staleness_in_queue_versions", trained - newest)
    for end, taken in line["durations"].items():
        for duration_s in taken:
            metrics.observe("group_seconds", duration_s, end=end)
    for drop in pending.dropped:
        metrics.count("groups_dropped_total", reason=drop.reason.value)
    metrics.count("groups_void_total", len(pending.voids))
    for env, outcome in line["environments"].items():
        metrics.count("environment_steps_total", outcome["environment_steps"], env=env)
    metrics.set("learner_step", line["step"])
    metrics.set("learner_step_timestamp_seconds", line["time"])
    # A rate over a histogram has nothing to say between two steps that are minutes apart.
    metrics.set("last_step_seconds", line["step_s"])
    metrics.set("last_wait_seconds", line["wait_s"])
    for quantity in MIRRORED:
        if (value := line[quantity.name]) is not None:
            _record(metrics, quantity, value)


def _record(metrics: Metrics, quantity: Quantity, value: float) -> None:
    match quantity.metric:
        case "counter":
            metrics.count(quantity.metric_name, value)
        case "histogram":
            metrics.observe(quantity.metric_name, value)
        case _:
            metrics.set(quantity.metric_name, value)


WITHOUT_LABELS = {metric.name for metric in TABLE["learner"] if not metric.labels}
MIRRORED = [
    quantity
    for quantity in QUANTITIES.values()
    if quantity.metric and quantity.metric_name in WITHOUT_LABELS
]
"""Quantities of a step that the learner's metrics have as one number each."""
