"""Log-probabilities become a loss, and the sums from which a step's metrics are made.

Place in the flow: Batch → micro-batches → **loss** → gradient. Pure functions of torch tensors. Everything is a sum
over trained tokens; the caller divides by the tokens of the whole batch, so neither the split into micro-batches nor
the number of ranks changes the gradient. Axis: N, the trained tokens of one micro-batch; observation and padding
tokens are not among them.

μ is the behaviour policy, whose log-probability was recorded when the token was sampled; π the policy in training. The
ratio r = π/μ already accounts for staleness and for the difference of two engines, so no further importance weight is
multiplied onto it.
"""

import math
from dataclasses import astuple, dataclass, replace

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""|log r| beyond this is cut: exp stays finite in float32, and infinity times a zero gradient is NaN."""


@dataclass(frozen=True, slots=True)
class LossSettings:
    """The trust region of the `rl` objective; `common/config.py` documents the knobs."""

    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = 3.0
    importance_cap: float | None = None


@dataclass(frozen=True, slots=True)
class Behaviour:
    """What was recorded of each trained token."""

    logprobs_N: Tensor
    """log μ."""
    advantages_N: Tensor
    fresh_N: Tensor
    """True where the very version that is trained sampled the token."""


def imitation_loss(logprobs_N: Tensor) -> Tensor:
    """Return the negative log-likelihood of each token."""
    return -logprobs_N


def ppo_loss(logprobs_N: Tensor, behaviour: Behaviour, settings: LossSettings) -> Tensor:
    """Return −min(r A, clip(r, 1 − low, 1 + high) A) of each token, and no more than −`dual_clip` A where A < 0.

    PPO (arXiv 1707.06347) anchored on μ, with clip-higher (DAPO, arXiv 2503.14476) and the dual clip
    (arXiv 1912.09729). With `importance_cap`, a token above it weighs as much as the cap, in value and in gradient.
    """
    ratio_N, advantages_N = importance(logprobs_N, behaviour), behaviour.advantages_N
    if settings.importance_cap is not None:
        ratio_N = ratio_N * (settings.importance_cap / ratio_N.detach()).clamp(max=1.0)
    clipped_N = ratio_N.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    surrogate_N = torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N)
    if settings.dual_clip is not None:
        bounded_N = torch.maximum(surrogate_N, settings.dual_clip * advantages_N)
        surrogate_N = torch.where(advantages_N < 0, bounded_N, surrogate_N)
    return -surrogate_N


def ppo_stopped(logprobs_N: Tensor, behaviour: Behaviour, settings: LossSettings) -> Tensor:
    """Return which tokens the trust region leaves without gradient: A pushes r further out of it."""
    ratio_N, advantages_N = importance(logprobs_N, behaviour), behaviour.advantages_N
    if settings.importance_cap is not None:
        ratio_N = ratio_N.clamp(max=settings.importance_cap)
    above_N = (advantages_N > 0) & (ratio_N > 1.0 + settings.clip_high)
    below_N = (advantages_N < 0) & (ratio_N < 1.0 - settings.clip_low)
    if settings.dual_clip is None:
        return above_N | below_N
    return above_N | below_N | ((advantages_N < 0) & (ratio_N > settings.dual_clip))


def importance(logprobs_N: Tensor, behaviour: Behaviour) -> Tensor:
    """Return r = π/μ of each token."""
    return (logprobs_N - behaviour.logprobs_N).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


@dataclass(frozen=True, slots=True)
class Tally:
    """Sums over trained tokens. Tallies add up over micro-batches and ranks."""

    tokens: float = 0.0
    loss: float = 0.0
    entropy: float = 0.0
    compared: float = 0.0
    """Tokens with a behaviour policy, none in imitation: the count of all that follows."""
    kl: float = 0.0
    gap: float = 0.0
    fresh: float = 0.0
    gap_fresh: float = 0.0
    stopped: float = 0.0
    importance: float = 0.0
    importance_squared: float = 0.0
    importance_max: float = 0.0
    """Not a sum: the largest."""

    def __add__(self, other: "Tally") -> "Tally":
        added = Tally(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))
        return replace(added, importance_max=max(self.importance_max, other.importance_max))

    @property
    def ess(self) -> float:
        """Effective sample size (Σr)² / (N Σr²): 1 when all tokens weigh the same."""
        return mean(self.importance**2, self.compared * self.importance_squared)


def mean(total: float, count: float) -> float:
    """Return total / count; NaN when nothing was counted."""
    return total / count if count else math.nan


def imitation_tally(loss_N: Tensor, entropies_N: Tensor) -> Tally:
    """Sum up imitation: an expert's tokens have no behaviour policy that π could be compared with."""
    return Tally(*_sums(torch.ones_like(loss_N), loss_N, entropies_N))


@torch.no_grad()
def ppo_tally(
    loss_N: Tensor, entropies_N: Tensor, logprobs_N: Tensor, behaviour: Behaviour, settings: LossSettings
) -> Tally:
    """Sum up RL; `kl` is the k3 estimate of KL(μ ‖ π), r − 1 − log r, unbiased as the tokens are samples of μ."""
    ratio_N, one_N, fresh_N = importance(logprobs_N, behaviour), torch.ones_like(loss_N), behaviour.fresh_N
    gap_N = (logprobs_N - behaviour.logprobs_N).abs()
    stopped_N = ppo_stopped(logprobs_N, behaviour, settings)
    largest = ratio_N.amax() if ratio_N.numel() else ratio_N
    return Tally(
        *_sums(one_N, loss_N, entropies_N, one_N, ratio_N - 1.0 - ratio_N.log()),
        *_sums(gap_N, fresh_N, gap_N * fresh_N, stopped_N, ratio_N, ratio_N.square(), largest),
    )


def _sums(*columns: Tensor) -> list[float]:
    """Sum each column in float64, with one transfer from the device."""
    return [float(total) for total in torch.stack([column.detach().double().sum() for column in columns]).tolist()]
