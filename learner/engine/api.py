"""The learner engine's seam: a Batch in, new weights out.

`registry.py` chooses the implementation by `learner.backend`. Every method blocks; rank 0 calls them from one worker
thread, and with several ranks the others follow (`ranks.py`). Imports no torch.
"""

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from horizonrl.common.config.objective import Objective
from horizonrl.learner.algorithm.batch import Batch, Trace


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What an engine needs to know; `common/config/schema.py` documents the keys."""

    model_dir: Path
    backend: str = "deepspeed"
    lora_rank: int = 0
    """Rank of the adapters that are trained on top of a frozen model; 0 trains the model itself."""
    zero_stage: int = 1
    threads: int = 1
    micro_batch_tokens: int = 2048
    max_grad_norm: float = 1.0
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    gradient_checkpointing: bool = False
    seed: int = 0
    temperature: float = 1.0
    """The rollout temperature: recorded logprobs are those of the distribution after temperature. Demonstrations are
    fitted at 1: an expert has no temperature, both the pretrained and the exported model are meant to run at 1, and
    the size of a cloning step must not depend on how rollouts are sampled."""
    collective_timeout_s: float = 1800.0
    """A collective that waits longer for another rank ends in an error."""
    objective: Objective = field(default_factory=Objective)
    deepspeed: Mapping[str, Any] = field(default_factory=dict)
    """More of DeepSpeed's configuration; `common/config/deepspeed.py` says which keys it may have."""
    longest_episode_tokens: int = 1024
    """Most tokens that an episode can generate; `loss.normalisation = constant` divides by it."""

    @property
    def adamw(self) -> dict[str, Any]:
        """The arguments of torch's AdamW, apart from the rate, which every step sets."""
        return {"betas": self.betas, "eps": 1e-8, "weight_decay": self.weight_decay}


@dataclass(frozen=True, slots=True)
class StepStats:
    """What the training of one batch measured, over its trained tokens.

    Demonstrations have no behaviour policy. They do not count in `kl`, in either gap, in `clip_share`, in the
    importance figures or in `ess`; these are NaN if the batch holds nothing else.
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
    """The same gap over the tokens that the trained version itself sampled, where only the difference between the two
    engines is left. NaN if the batch holds no such token (see `Engine.logprob_gap_at`)."""
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
    updates: int = 1
    """Optimizer updates that were made. `loss.kl_max` may leave some out."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """What a loss of another package measures, as means over the tokens with a behaviour policy."""


class Engine(Protocol):
    def train_step(self, batch: Batch, lr: float) -> StepStats:
        """Make the next version of the policy from the batch: one optimizer step, or as many as the objective says.

        Raises ValueError for a batch without trained tokens, RunFailed if a gradient is not finite.
        """

    def logprob_gap_at(self, trace: Trace, version: int, weights: Path) -> float:
        """Return the mean |log π − log μ| over the trace's tokens of `version`, with π read from its weights file.

        This is the difference between the two engines alone, for a batch without a token of the version in training.
        """

    def write_weights(self, path: Path) -> str:
        """Write the policy's weights as safetensors (bfloat16, Hugging Face names); return their xxh3_128 digest."""

    def begin_write_weights(self, path: Path) -> Future[str]:
        """Begin `write_weights` of the policy as it is now; its result comes with the file.

        The next batch may be in training by then: as much of it as leaves the policy as it is.
        """

    def save(self, directory: Path, state: dict[str, Any]) -> None:
        """Write the training state and `state` (JSON-able) into `directory`: everything an exact resume needs.

        The policy's weights file is not part of it; the caller writes it beforehand and puts it there.
        """

    def load(self, directory: Path) -> dict[str, Any]:
        """Restore what `save` wrote, with any number of ranks, and return its `state`.

        Raises CheckpointError if the directory holds no complete checkpoint of this model.
        """

    def close(self) -> None:
        """Free the memory; no other call may follow."""


@runtime_checkable
class SavesAside(Protocol):
    """What an engine may offer on top: to write a checkpoint while the next batch is already in training."""

    stalled_s: float
    """Seconds that its calls have waited for a checkpoint so far."""

    def begin_save(self, directory: Path, state: dict[str, Any]) -> Future[None]:
        """Begin what `save` does; the result comes when all files are written. The next optimizer step waits for it."""


class RankEngine(Engine, Protocol):
    """The engine of one rank, and what its process has to know of it."""

    rank: int
    ranks: int
    """Number of ranks that have to make the same calls; 1 for an engine that is alone."""
    vocabulary: int
    """Number of token ids that the model knows."""
