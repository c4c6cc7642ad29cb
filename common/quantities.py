"""What a step measures: one name for each quantity, wherever it is shown.

The name is the key in `metrics.jsonl`. From it follow the key of a tracker (`train/NAME`) and the name in Prometheus
(`horizonrl_NAME`), where a unit is spelled out and a counter ends with `_total`. The title of its curve in the report
and its column on the console are in the table too, which `docs/metrics.md` shows. `metrics.py` declares a quantity for
Prometheus by itself, unless it needs labels or buckets.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

OWN = "own/"
"""How the name of a number begins that a loss of another package measures (docs/own-loss.md)."""


@dataclass(frozen=True, slots=True)
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
        "success_rate",
        "share",
        "Share of the valid episodes that were solved.",
        metric="gauge",
        curve="Success",
        column="success",
    ),
    Quantity(
        "reward_mean",
        "return",
        "Mean return of the valid episodes.",
        metric="gauge",
        curve="Reward",
        column="reward",
    ),
    Quantity("return_std", "return", "Standard deviation of the valid episodes' returns."),
    Quantity(
        "turns_mean",
        "turns",
        "Mean number of turns of the valid episodes.",
        curve="Turns",
        column="turns",
    ),
    Quantity(
        "truncated_share",
        "share",
        "Share of the valid episodes ended by the horizon, the context or the environment's limit.",
        metric="gauge",
        curve="Truncated",
        column="truncated",
    ),
    Quantity("context_share", "share", "Share of the valid episodes ended by the context."),
    Quantity("error_share", "share", "Share of all episodes ended by an error."),
    Quantity(
        "horizon",
        "turns",
        "Longest horizon of the consumed groups.",
        curve="Horizon",
        column="horizon",
    ),
)

# What they cost, and what became of groups and tickets
COSTS = (
    Quantity("episodes", "episodes", "Consumed episodes, broken ones included."),
    Quantity("environment_steps", "turns", "Turns of the consumed episodes.", metric="counter"),
    Quantity(
        "generated_tokens", "tokens", "Generated tokens of the consumed episodes.", metric="counter"
    ),
    Quantity(
        "processed_tokens",
        "tokens",
        "Prompts, generations and observations of the consumed episodes.",
    ),
    Quantity("tokens_trained", "tokens", "Generated tokens trained on.", metric="counter"),
    Quantity("groups_trained", "groups", "Groups trained on.", metric="counter", curve="Groups"),
    Quantity("groups_dropped", "groups", "Groups dropped.", metric="counter", curve="Groups"),
    Quantity("tickets_issued", "tickets", "Tickets issued so far, of all kinds.", metric="counter"),
    Quantity("tickets_outstanding", "tickets", "Tickets issued and not settled.", metric="gauge"),
)

# How far the data was from the policy that it trained
CORRECTIONS = (
    Quantity(
        "staleness_mean",
        "versions",
        "Mean number of versions that trained groups were behind.",
        curve="Staleness",
    ),
    Quantity(
        "staleness_max",
        "versions",
        "Versions that the oldest trained group was behind.",
        curve="Staleness",
        column="stale",
    ),
    Quantity(
        "logprob_gap",
        "nats",
        "Mean absolute difference of actor's and learner's logprobs of the same tokens.",
        metric="gauge",
        curve="Logprob gap",
        column="gap",
    ),
    Quantity(
        "logprob_gap_fresh",
        "nats",
        "Logprob gap of the current version's tokens: the difference of the engines.",
        curve="Logprob gap",
    ),
    Quantity(
        "kl",
        "nats",
        "k3 estimate of KL(behaviour || learner) before the step: how far off-policy the data is.",
        metric="gauge",
        curve="KL divergence",
    ),
    Quantity(
        "reference_kl", "nats", "k3 estimate of KL(learner || reference).", curve="KL divergence"
    ),
    Quantity(
        "importance_mean",
        "ratio",
        "Mean importance ratio.",
        metric="gauge",
        curve="Importance ratio",
    ),
    Quantity(
        "importance_max",
        "ratio",
        "Largest importance ratio.",
        metric="gauge",
        curve="Importance ratio",
    ),
    Quantity(
        "ess",
        "share",
        "Effective sample size of the importance ratios.",
        metric="gauge",
        curve="Effective sample size",
    ),
)

# What training made of it
TRAINING = (
    Quantity("loss", "", "The loss.", curve="Loss", column="loss"),
    Quantity(
        "grad_norm", "", "Gradient norm before clipping.", metric="gauge", curve="Gradient norm"
    ),
    Quantity("lr", "", "Learning rate."),
    Quantity("entropy", "nats", "Mean entropy of the policy per token.", curve="Entropy"),
    Quantity(
        "clip_share", "share", "Share of the tokens whose gradient was clipped.", curve="Clip share"
    ),
    Quantity("value_error", "return", "Root mean square error of the critic."),
    Quantity("updates", "updates", "Optimizer updates made."),
)

# How long it took
SPEED = (
    Quantity(
        "step_s",
        "seconds",
        "Duration of the step, from the full batch until the next wait.",
        metric="histogram",
        curve="Time per step",
        column="step s",
    ),
    Quantity(
        "wait_s",
        "seconds",
        "Wait for the step's batch.",
        metric="histogram",
        curve="Time per step",
        column="wait s",
    ),
    Quantity(
        "train_tokens_per_s",
        "tokens/s",
        "Trained tokens per second of engine time.",
        curve="Throughput",
    ),
    Quantity(
        "generated_tokens_per_s",
        "tokens/s",
        "Generated tokens per second of step and wait.",
        curve="Throughput",
        column="tok/s",
    ),
    Quantity(
        "weights_bytes",
        "bytes",
        "Bytes published for the version.",
        metric="gauge",
        curve="Weights published",
    ),
    Quantity(
        "weights_publish_s",
        "seconds",
        "Time to write and publish the version, in parallel with the next step.",
        metric="histogram",
    ),
)

QUANTITIES: Mapping[str, Quantity] = {
    quantity.name: quantity for quantity in (*OUTCOMES, *COSTS, *CORRECTIONS, *TRAINING, *SPEED)
}
"""By name, in the order in which the documentation shows them."""
