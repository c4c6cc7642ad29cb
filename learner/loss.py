"""Log-probabilities become a loss, and the sums from which a step's metrics are made.

Place in the flow: Batch → micro-batches → **loss** → gradient. Pure functions of torch tensors. Everything is a sum
over trained tokens; the caller divides by the tokens of the whole batch, so neither the split into micro-batches nor
the number of ranks changes the gradient. Axis: N, the trained tokens of one micro-batch; observation and padding
tokens are not among them.

μ is the behaviour policy, whose log-probability was recorded when the token was sampled; π the policy in training. The
ratio r = π/μ already accounts for staleness and for the difference of two engines, so no further importance weight is
multiplied onto it: `correction.py` weighs only `reinforce` and `decoupled_ppo`. A kind is added by writing its
function, and its `_stopped` where it has a trust region, and naming both in `LOSSES`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, field, replace

import torch
from torch import Tensor

from horizonrl.learner.correction import CorrectionSettings, episode_mean, kept, ratio, weights


@dataclass(frozen=True, slots=True)
class LossSettings:
    """The `rl` objective; `common/config.py` documents the knobs."""

    kind: str = "ppo"
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = 3.0
    importance_cap: float | None = None
    dppo_delta: float = 0.2
    dppo_penalty: float = 1e-3
    cispo_cap: float = 5.0
    gspo_low: float = 3e-4
    gspo_high: float = 4e-4
    correction: CorrectionSettings = field(default_factory=CorrectionSettings)


@dataclass(frozen=True, slots=True)
class Behaviour:
    """What was recorded of each trained token."""

    logprobs_N: Tensor
    """log μ."""
    advantages_N: Tensor
    lags_N: Tensor
    """Versions that the one which sampled the token is behind the one in training; 0 is fresh."""
    episodes_N: Tensor
    """Which episode of the micro-batch the token is of."""


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


def dppo_loss(logprobs_N: Tensor, behaviour: Behaviour, settings: LossSettings) -> Tensor:
    """Return −r A where the trust region in probability leaves it, plus τ log² r of every token.

    DPPO (arXiv 2602.04879) with the binary total variation; the penalty τ also draws stopped tokens back to μ.
    """
    log_ratio_N = logprobs_N - behaviour.logprobs_N
    surrogate_N = importance(logprobs_N, behaviour) * behaviour.advantages_N
    going_N = ~dppo_stopped(logprobs_N, behaviour, settings)
    return settings.dppo_penalty * log_ratio_N.square() - torch.where(going_N, surrogate_N, 0.0)


def dppo_stopped(logprobs_N: Tensor, behaviour: Behaviour, settings: LossSettings) -> Tensor:
    """Return the tokens whose probability A has moved by more than δ: A > 0 and π − μ > δ, or A ≤ 0 and π − μ < −δ."""
    moved_N = logprobs_N.detach().exp() - behaviour.logprobs_N.exp()
    good_N = behaviour.advantages_N > 0
    return (good_N & (moved_N > settings.dppo_delta)) | (~good_N & (moved_N < -settings.dppo_delta))


def cispo_loss(logprobs_N: Tensor, behaviour: Behaviour, settings: LossSettings) -> Tensor:
    """Return −sg(min(r, cap)) A log π: every token keeps a gradient (CISPO, arXiv 2506.13585)."""
    weight_N = importance(logprobs_N, behaviour).detach().clamp(max=settings.cispo_cap)
    return -weight_N * behaviour.advantages_N * logprobs_N


def reinforce_loss(logprobs_N: Tensor, behaviour: Behaviour, settings: LossSettings) -> Tensor:
    """Return −sg(w) A log π, w the correction of π/μ; by default min(r, 2)."""
    log_ratio_N = logprobs_N.detach() - behaviour.logprobs_N
    weight_N = weights(log_ratio_N, behaviour.episodes_N, settings.correction)
    return -weight_N * behaviour.advantages_N * logprobs_N


def gspo_loss(logprobs_N: Tensor, behaviour: Behaviour, settings: LossSettings) -> Tensor:
    """Return −min(s A, clip(s) A), s the geometric mean of r over the token's episode (GSPO, arXiv 2507.18071)."""
    return -_clipped(_sequence(logprobs_N, behaviour), behaviour, settings.gspo_low, settings.gspo_high)


def gspo_stopped(logprobs_N: Tensor, behaviour: Behaviour, settings: LossSettings) -> Tensor:
    return _beyond(_sequence(logprobs_N, behaviour), behaviour, settings.gspo_low, settings.gspo_high)


def decoupled_ppo_loss(logprobs_N: Tensor, behaviour: Behaviour, settings: LossSettings) -> Tensor:
    """Return −sg(w) min(ρ A, clip(ρ) A): ρ = π/π_prox, w the correction of π_prox/μ (arXiv 2110.00641)."""
    proximal_N = _proximal(logprobs_N, behaviour)
    weight_N = weights(proximal_N - behaviour.logprobs_N, behaviour.episodes_N, settings.correction)
    return -weight_N * _clipped(ratio(logprobs_N - proximal_N), behaviour, settings.clip_low, settings.clip_high)


def decoupled_ppo_stopped(logprobs_N: Tensor, behaviour: Behaviour, settings: LossSettings) -> Tensor:
    rho_N = ratio(logprobs_N - _proximal(logprobs_N, behaviour))
    return _beyond(rho_N, behaviour, settings.clip_low, settings.clip_high)


def never_stopped(logprobs_N: Tensor, behaviour: Behaviour, settings: LossSettings) -> Tensor:
    """Return that no token is stopped: the kind has no trust region."""
    return torch.zeros_like(logprobs_N, dtype=torch.bool)


TokenRule = Callable[[Tensor, Behaviour, LossSettings], Tensor]
LOSSES: Mapping[str, tuple[TokenRule, TokenRule]] = {
    "ppo": (ppo_loss, ppo_stopped),
    "decoupled_ppo": (decoupled_ppo_loss, decoupled_ppo_stopped),
    "dppo": (dppo_loss, dppo_stopped),
    "cispo": (cispo_loss, never_stopped),
    "gspo": (gspo_loss, gspo_stopped),
    "reinforce": (reinforce_loss, never_stopped),
}
"""Of each kind the loss, and which tokens its trust region leaves without the gradient of A."""


def policy_loss(logprobs_N: Tensor, behaviour: Behaviour, settings: LossSettings) -> Tensor:
    """Return the loss of each token: that of the settings' kind, 0 where a mask drops the token."""
    loss_N, kept_N = LOSSES[settings.kind][0](logprobs_N, behaviour, settings), _kept(logprobs_N, behaviour, settings)
    return loss_N if kept_N is None else torch.where(kept_N, loss_N, 0.0)


def policy_stopped(logprobs_N: Tensor, behaviour: Behaviour, settings: LossSettings) -> Tensor:
    """Return which tokens the trust region stops or a mask drops."""
    stopped_N, kept_N = (
        LOSSES[settings.kind][1](logprobs_N, behaviour, settings),
        _kept(logprobs_N, behaviour, settings),
    )
    return stopped_N if kept_N is None else stopped_N | ~kept_N


def importance(logprobs_N: Tensor, behaviour: Behaviour) -> Tensor:
    """Return r = π/μ of each token."""
    return ratio(logprobs_N - behaviour.logprobs_N)


def _kept(logprobs_N: Tensor, behaviour: Behaviour, settings: LossSettings) -> Tensor | None:
    log_ratio_N = logprobs_N.detach() - behaviour.logprobs_N
    return kept(log_ratio_N, behaviour.advantages_N, behaviour.episodes_N, settings.correction)


def _sequence(logprobs_N: Tensor, behaviour: Behaviour) -> Tensor:
    return ratio(episode_mean(logprobs_N - behaviour.logprobs_N, behaviour.episodes_N))


def _proximal(logprobs_N: Tensor, behaviour: Behaviour) -> Tensor:
    """Return log π_prox, the version before the one in training, on the line from log μ to log π.

    α = (v_prox − v_t) / (v − v_t), which saves a second forward pass (AReaL). A fresh token's is π itself.
    """
    behind_N = behaviour.lags_N.clamp(min=1).to(logprobs_N.dtype)
    alpha_N = torch.where(behaviour.lags_N > 0, (behind_N - 1.0) / behind_N, 1.0)
    return torch.lerp(behaviour.logprobs_N, logprobs_N.detach(), alpha_N)


def _clipped(ratio_N: Tensor, behaviour: Behaviour, low: float, high: float) -> Tensor:
    advantages_N = behaviour.advantages_N
    return torch.minimum(ratio_N * advantages_N, ratio_N.clamp(1.0 - low, 1.0 + high) * advantages_N)


def _beyond(ratio_N: Tensor, behaviour: Behaviour, low: float, high: float) -> Tensor:
    above_N = (behaviour.advantages_N > 0) & (ratio_N > 1.0 + high)
    return above_N | ((behaviour.advantages_N < 0) & (ratio_N < 1.0 - low))


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
    ratio_N, one_N, fresh_N = importance(logprobs_N, behaviour), torch.ones_like(loss_N), behaviour.lags_N == 0
    gap_N = (logprobs_N - behaviour.logprobs_N).abs()
    stopped_N = policy_stopped(logprobs_N, behaviour, settings)
    largest = ratio_N.amax() if ratio_N.numel() else ratio_N
    return Tally(
        *_sums(one_N, loss_N, entropies_N, one_N, ratio_N - 1.0 - ratio_N.log()),
        *_sums(gap_N, fresh_N, gap_N * fresh_N, stopped_N, ratio_N, ratio_N.square(), largest),
    )


def _sums(*columns: Tensor) -> list[float]:
    """Sum each column in float64, with one transfer from the device."""
    return [float(total) for total in torch.stack([column.detach().double().sum() for column in columns]).tolist()]
