"""What a step measures: one name for each quantity, wherever it is shown.

The name is the key in `metrics.jsonl`. From it follow the key of a tracker (`train/NAME`) and the name in Prometheus
(`horizonrl_NAME`), where a unit is spelled out and a counter ends with `_total`. The title of its curve in the report
and its column on the console are in the table too, which `docs/metrics.md` shows. `metrics.py` declares a quantity for
Prometheus by itself, unless it needs labels or buckets.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    name: str
    """The key in `metrics.jsonl`."""
    unit: str
    """Empty for a number without one."""
    meaning: str
    metric: Literal["gauge", "counter", "histogram"] | None = None
    """Its kind in Prometheus; None if only files have it."""
    curve: str = ""
    """Title of the curve that draws it in the report; two quantities may share one."""
    column: str = ""
    """Its column on the console."""

    @property
    def metric_name(self) -> str:
        """The name in Prometheus, without the prefix of all metrics."""
        # Prometheus wants base units spelled out and `_total` on counters; the short key suits a file that people read.
        spelled = (
            f"{self.name.removesuffix('_s')}_seconds" if self.name.endswith("_s") else self.name
        )
        return f"{spelled}_total" if self.metric == "counter" else spelled


# What the episodes came to
OUTCOMES = (
    Quantity(
        name="success_rate",
        unit="share",
        meaning="Share of the valid episodes that were solved.",
        metric="gauge",
        curve="Success",
        column="success",
    ),
    Quantity(
        name="reward_mean",
        unit="return",
        meaning="Mean return of the valid episodes.",
        metric="gauge",
        curve="Reward",
        column="reward",
    ),
    Quantity(
        name="return_std",
        unit="return",
        meaning="Standard deviation of the valid episodes' returns.",
    ),
    Quantity(
        name="turns_mean",
        unit="turns",
        meaning="Mean number of turns of the valid episodes.",
        curve="Turns",
        column="turns",
    ),
    Quantity(
        name="truncated_share",
        unit="share",
        meaning="Share of the valid episodes ended by the horizon, the context or the environment's limit.",
        metric="gauge",
        curve="Truncated",
        column="truncated",
    ),
    Quantity(
        name="context_share",
        unit="share",
        meaning="Share of the valid episodes ended by the context.",
    ),
    Quantity(name="error_share", unit="share", meaning="Share of all episodes ended by an error."),
    Quantity(
        name="horizon",
        unit="turns",
        meaning="Longest horizon of the consumed groups.",
        curve="Horizon",
        column="horizon",
    ),
)

# What they cost, and what became of groups and tickets
COSTS = (
    Quantity(name="episodes", unit="episodes", meaning="Consumed episodes, broken ones included."),
    Quantity(
        name="environment_steps",
        unit="turns",
        meaning="Turns of the consumed episodes.",
        metric="counter",
    ),
    Quantity(
        name="generated_tokens",
        unit="tokens",
        meaning="Generated tokens of the consumed episodes.",
        metric="counter",
    ),
    Quantity(
        name="processed_tokens",
        unit="tokens",
        meaning="Prompts, generations and observations of the consumed episodes.",
    ),
    Quantity(
        name="tokens_trained",
        unit="tokens",
        meaning="Generated tokens trained on.",
        metric="counter",
    ),
    Quantity(
        name="groups_trained",
        unit="groups",
        meaning="Groups trained on.",
        metric="counter",
        curve="Groups",
    ),
    Quantity(
        name="groups_dropped",
        unit="groups",
        meaning="Groups dropped.",
        metric="counter",
        curve="Groups",
    ),
    Quantity(
        name="tickets_issued",
        unit="tickets",
        meaning="Tickets issued so far, of all kinds.",
        metric="counter",
    ),
    Quantity(
        name="tickets_outstanding",
        unit="tickets",
        meaning="Tickets issued and not settled.",
        metric="gauge",
    ),
)

# How far the data was from the policy that it trained
CORRECTIONS = (
    Quantity(
        name="staleness_mean",
        unit="versions",
        meaning="Mean number of versions that trained groups were behind.",
        curve="Staleness",
    ),
    Quantity(
        name="staleness_max",
        unit="versions",
        meaning="Versions that the oldest trained group was behind.",
        curve="Staleness",
        column="stale",
    ),
    Quantity(
        name="logprob_gap",
        unit="nats",
        meaning="Mean absolute difference of actor's and learner's logprobs of the same tokens.",
        metric="gauge",
        curve="Logprob gap",
        column="gap",
    ),
    Quantity(
        name="logprob_gap_fresh",
        unit="nats",
        meaning="Logprob gap of the current version's tokens: the difference of the engines.",
        curve="Logprob gap",
    ),
    Quantity(
        name="kl",
        unit="nats",
        meaning="k3 estimate of KL(behaviour || learner) before the step: how far off-policy the data is.",
        metric="gauge",
        curve="KL divergence",
    ),
    Quantity(
        name="reference_kl",
        unit="nats",
        meaning="k3 estimate of KL(learner || reference).",
        curve="KL divergence",
    ),
    Quantity(
        name="importance_mean",
        unit="ratio",
        meaning="Mean importance ratio.",
        metric="gauge",
        curve="Importance ratio",
    ),
    Quantity(
        name="importance_max",
        unit="ratio",
        meaning="Largest importance ratio.",
        metric="gauge",
        curve="Importance ratio",
    ),
    Quantity(
        name="ess",
        unit="share",
        meaning="Effective sample size of the importance ratios.",
        metric="gauge",
        curve="Effective sample size",
    ),
)

# What training made of it
TRAINING = (
    Quantity(name="loss", unit="", meaning="The loss.", curve="Loss", column="loss"),
    Quantity(
        name="grad_norm",
        unit="",
        meaning="Gradient norm before clipping.",
        metric="gauge",
        curve="Gradient norm",
    ),
    Quantity(name="lr", unit="", meaning="Learning rate."),
    Quantity(
        name="entropy",
        unit="nats",
        meaning="Mean entropy of the policy per token.",
        curve="Entropy",
    ),
    Quantity(
        name="clip_share",
        unit="share",
        meaning="Share of the tokens whose gradient was clipped.",
        curve="Clip share",
    ),
    Quantity(name="value_error", unit="return", meaning="Root mean square error of the critic."),
    Quantity(name="updates", unit="updates", meaning="Optimizer updates made."),
)

# How long it took
SPEED = (
    Quantity(
        name="step_s",
        unit="seconds",
        meaning="Duration of the step, from the full batch until the next wait.",
        metric="histogram",
        curve="Time per step",
        column="step s",
    ),
    Quantity(
        name="wait_s",
        unit="seconds",
        meaning="Wait for the step's batch.",
        metric="histogram",
        curve="Time per step",
        column="wait s",
    ),
    Quantity(
        name="train_tokens_per_s",
        unit="tokens/s",
        meaning="Trained tokens per second of engine time.",
        curve="Throughput",
    ),
    Quantity(
        name="generated_tokens_per_s",
        unit="tokens/s",
        meaning="Generated tokens per second of step and wait.",
        curve="Throughput",
        column="tok/s",
    ),
    Quantity(
        name="weights_bytes",
        unit="bytes",
        meaning="Bytes published for the version.",
        metric="gauge",
        curve="Weights published",
    ),
    Quantity(
        name="weights_publish_s",
        unit="seconds",
        meaning="Time to write and publish the version, in parallel with the next step.",
        metric="histogram",
    ),
)

QUANTITIES: Mapping[str, Quantity] = {
    quantity.name: quantity for quantity in (*OUTCOMES, *COSTS, *CORRECTIONS, *TRAINING, *SPEED)
}
"""By name, in the order in which the documentation shows them."""
