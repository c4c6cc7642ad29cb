"""The learner engine's seam: a Batch in, new weights out.

`engine.py` keeps it on DeepSpeed. Every method blocks; rank 0 calls them from one worker thread, and with several
ranks the others follow (`ranks.py`).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from horizonrl.learner.intake.batch import Batch, Trace


@dataclass(frozen=True, slots=True)
class StepStats:
    """What the training of one batch measured, over its trained tokens.

    Demonstrations know no behaviour policy: they stand outside `kl`, both gaps, `clip_share`, the importance figures
    and `ess`, which are NaN when there is nothing else.
    """

    loss: float
    grad_norm: float
    lr: float
    entropy: float
    """Mean entropy of the learner's policy, in nats."""
    kl: float
    """Mean k3 estimate of KL(behaviour || learner), before the step."""
    logprob_gap: float
    """Mean absolute difference of the learner's and the behaviour policy's logprobs, before the step."""
    logprob_gap_fresh: float
    """The same for tokens and weights of one version: what is left is the difference of two engines. Over the tokens
    that the trained version sampled; NaN when the batch holds none (see `Engine.logprob_gap_at`)."""
    clip_share: float
    """Share of tokens whose gradient the trust region stopped."""
    importance_mean: float
    importance_max: float
    ess: float
    """Effective sample size of the importance ratios, as a share of the tokens."""
    reference_kl: float
    """Mean k3 estimate of KL(learner || reference); NaN without a reference."""
    value_error: float
    """Root mean square of the critic's error; NaN without a critic."""
    trained_tokens: int
    compute_s: float


class Engine(Protocol):
    def train_step(self, batch: Batch, lr: float) -> StepStats:
        """Make the next version of the policy from the batch: one optimizer step, or as many as the objective says."""

    def logprob_gap_at(self, trace: Trace, version: int, weights: Path) -> float:
        """Return the mean |log π − log μ| over the trace's tokens of `version`, π taken from its weights file.

        The difference of two engines and nothing else, for a batch that holds no token of the version in training.
        """

    def write_weights(self, path: Path) -> str:
        """Write the policy's weights as safetensors (bfloat16, Hugging Face names); return their xxh3_128 digest."""

    def save(self, directory: Path, state: dict[str, Any]) -> None:
        """Write the training state and `state` (JSON-able) into `directory`: all that an exact resume needs.

        The policy's weights file is no part of it; the caller has written it before and puts it there.
        """

    def load(self, directory: Path) -> dict[str, Any]:
        """Restore what `save` wrote, with any number of ranks, and return its `state`."""

    def close(self) -> None: ...
