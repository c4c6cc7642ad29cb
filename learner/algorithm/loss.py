"""Turn log-probabilities into a loss per token: the kinds of `loss.kind`, and the estimators of a KL.

Place in the flow: micro-batch → **loss** → objective. Pure functions of torch tensors. Axis: N, the trained tokens of
one micro-batch; observation and padding tokens are not among them.

μ is the behaviour policy, whose log-probability was recorded when the token was sampled; π the policy in training. The
ratio r = π/μ already accounts for staleness and for the difference of two engines, so no further importance weight is
multiplied onto it: `correction.py` weighs only `reinforce`, `decoupled_ppo` and `gspo`. To add a kind, write its
section, its function, and its `_clipped` if it has a trust region, and name both in `LOSSES`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from horizonrl.common.config.objective import (
    CispoLoss,
    ClippedLoss,
    DecoupledPpoLoss,
    DppoLoss,
    GspoLoss,
    LossSection,
    Objective,
    OwnLoss,
    PpoLoss,
)
from horizonrl.learner.algorithm.correction import (
    LOG_RATIO_BOUND,
    episode_mean,
    kept,
    ratio,
    weights,
)
from horizonrl.learner.algorithm.own import own_loss

Weigh = Callable[[Tensor], Tensor]
"""Gives each token the correction's weight, from the logarithm of its ratio."""


@dataclass(frozen=True, slots=True)
class LossInputs:
    """What is known of each trained token before the update."""

    logprobs_N: Tensor
    """log μ."""
    advantages_N: Tensor
    lags_N: Tensor
    """Versions that the one which sampled the token is behind the one in training; 0 is fresh."""
    episodes_N: Tensor
    """The episode of the micro-batch that the token belongs to."""
    demo_N: Tensor
    """True where an expert wrote the token."""
    scales_N: Tensor
    """Weight of the token's loss in the objective."""
    proximal_N: Tensor
    """log π at the start of the step if the objective needs it, else 0."""
    reference_N: Tensor
    """log π_ref if the objective needs it, else 0."""
    targets_N: Tensor
    """The critic's targets; NaN at tokens without one."""
    episodes: int
    """Number of episodes of the micro-batch."""


def imitation_loss(logprobs_N: Tensor) -> Tensor:
    """Return the negative log-likelihood of each token."""
    return -logprobs_N


def ppo_loss(logprobs_N: Tensor, inputs: LossInputs, loss: PpoLoss, weigh: Weigh) -> Tensor:
    """Return −min(r A, clip(r, 1 − low, 1 + high) A) of each token, and no more than −`dual_clip` A where A < 0.

    PPO (arXiv 1707.06347) anchored on μ, with clip-higher (DAPO, arXiv 2503.14476) and the dual clip
    (arXiv 1912.09729). With `cap`, a token above it weighs as much as the cap, in value and in gradient.
    """
    ratio_N = importance(logprobs_N, inputs)
    if loss.cap is not None:
        # A constant factor, because clamp alone would leave a token above the cap without any gradient.
        ratio_N = ratio_N * (loss.cap / ratio_N.detach()).clamp(max=1.0)
    return -_clipped_surrogate(ratio_N, inputs, loss)


def ppo_clipped(logprobs_N: Tensor, inputs: LossInputs, loss: PpoLoss) -> Tensor:
    """Return the tokens that the trust region leaves without a gradient, because A pushes r further out of it."""
    ratio_N = importance(logprobs_N, inputs)
    if loss.cap is not None:
        ratio_N = ratio_N.clamp(max=loss.cap)
    return _beyond(ratio_N, inputs, loss)


def dppo_loss(logprobs_N: Tensor, inputs: LossInputs, loss: DppoLoss, weigh: Weigh) -> Tensor:
    """Return −r A where the trust region in probability leaves it, plus τ log² r of every token.

    DPPO (arXiv 2602.04879) with the binary total variation; the penalty τ also draws clipped tokens back to μ.
    """
    log_ratio_N = logprobs_N - inputs.logprobs_N
    surrogate_N = importance(logprobs_N, inputs) * inputs.advantages_N
    inside_N = ~dppo_clipped(logprobs_N, inputs, loss)
    return loss.penalty * log_ratio_N.square() - torch.where(inside_N, surrogate_N, 0.0)


def dppo_clipped(logprobs_N: Tensor, inputs: LossInputs, loss: DppoLoss) -> Tensor:
    """Return the tokens whose probability A has moved by more than δ: A > 0 and π − μ > δ, or A ≤ 0 and π − μ < −δ."""
    moved_N = logprobs_N.detach().exp() - inputs.logprobs_N.exp()
    good_N = inputs.advantages_N > 0
    return (good_N & (moved_N > loss.delta)) | (~good_N & (moved_N < -loss.delta))


def cispo_loss(logprobs_N: Tensor, inputs: LossInputs, loss: CispoLoss, weigh: Weigh) -> Tensor:
    """Return −sg(min(r, cap)) A log π: every token keeps a gradient (CISPO, arXiv 2506.13585)."""
    # Bounds the weight and not the way down: no trust region stops a token of negative advantage. At a learning rate of
    # 3e-4 the pocket model collapsed within eight steps (docs/algorithms.md, Losses).
    weight_N = importance(logprobs_N, inputs).detach().clamp(max=loss.cap)
    return -weight_N * inputs.advantages_N * logprobs_N


def reinforce_loss(
    logprobs_N: Tensor, inputs: LossInputs, loss: LossSection, weigh: Weigh
) -> Tensor:
    """Return −sg(w) A log π, w the correction of π/μ; by default min(r, 2)."""
    weight_N = weigh(logprobs_N.detach() - inputs.logprobs_N)
    return -weight_N * inputs.advantages_N * logprobs_N


def gspo_loss(logprobs_N: Tensor, inputs: LossInputs, loss: GspoLoss, weigh: Weigh) -> Tensor:
    """Return −sg(w) min(s A, clip(s) A), s the geometric mean of ρ = π/π_prox over the token's episode.

    GSPO (arXiv 2507.18071) in its token form (section 4.3), sg(s) π/sg(π): each token is moved by its own advantage.
    Where an episode has one advantage, the gradient of the sum is that of the sequence form. w is as for
    `decoupled_ppo`.
    """
    # Not π/μ: the band of 3e-4 is for a ratio that is 1 before the first update, and two engines differ by more.
    proximal_N = _proximal(logprobs_N, inputs, loss)
    surrogate_N = _clipped_surrogate(_sequence(logprobs_N, proximal_N, inputs), inputs, loss)
    return -weigh(proximal_N - inputs.logprobs_N) * surrogate_N


def gspo_clipped(logprobs_N: Tensor, inputs: LossInputs, loss: GspoLoss) -> Tensor:
    sequence_N = _sequence(logprobs_N, _proximal(logprobs_N, inputs, loss), inputs)
    return _beyond(sequence_N, inputs, loss)


def decoupled_ppo_loss(
    logprobs_N: Tensor, inputs: LossInputs, loss: DecoupledPpoLoss, weigh: Weigh
) -> Tensor:
    """Return −sg(w) min(ρ A, clip(ρ) A): ρ = π/π_prox, w the correction of π_prox/μ (arXiv 2110.00641)."""
    proximal_N = _proximal(logprobs_N, inputs, loss)
    # π/μ = (π_prox/μ) (π/π_prox): the weight has the staleness and the engines' difference, ρ the drift within the
    # step.
    weight_N = weigh(proximal_N - inputs.logprobs_N)
    return -weight_N * _clipped_surrogate(ratio(logprobs_N - proximal_N), inputs, loss)


def decoupled_ppo_clipped(logprobs_N: Tensor, inputs: LossInputs, loss: DecoupledPpoLoss) -> Tensor:
    return _beyond(ratio(logprobs_N - _proximal(logprobs_N, inputs, loss)), inputs, loss)


def never_clipped(logprobs_N: Tensor, inputs: LossInputs, loss: LossSection) -> Tensor:
    """Return False for every token: the kind has no trust region."""
    return torch.zeros_like(logprobs_N, dtype=torch.bool)


def k1(logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    """Return log π − log π_ref: unbiased, but as a loss without a gradient on average."""
    return logprobs_N - reference_N


def k2(logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    """Return half the square of the log-ratio: slightly biased, but its gradient is that of the KL."""
    return (logprobs_N - reference_N).square() / 2.0


def k3(logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    """Return q − 1 − log q, q = π_ref/π: unbiased and never negative (Schulman, "Approximating KL divergence").

    Beyond the bound, q continues along its tangent: it stays finite and still draws π towards π_ref.
    """
    log_q_N = reference_N - logprobs_N
    bounded_N = log_q_N.clamp(max=LOG_RATIO_BOUND)
    return bounded_N.exp() * (1.0 + log_q_N - bounded_N) - 1.0 - log_q_N


KL_ESTIMATORS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}

LossRule = Callable[[Tensor, LossInputs, Any, Weigh], Tensor]
ClipRule = Callable[[Tensor, LossInputs, Any], Tensor]
LOSSES: Mapping[str, tuple[LossRule, ClipRule]] = {
    "ppo": (ppo_loss, ppo_clipped),
    "decoupled_ppo": (decoupled_ppo_loss, decoupled_ppo_clipped),
    "dppo": (dppo_loss, dppo_clipped),
    "cispo": (cispo_loss, never_clipped),
    "gspo": (gspo_loss, gspo_clipped),
    "reinforce": (reinforce_loss, never_clipped),
}
"""For each kind: its loss, and the tokens that its trust region leaves without the gradient of A."""


def policy_loss(logprobs_N: Tensor, inputs: LossInputs, objective: Objective) -> Tensor:
    """Return each token's loss by the objective's kind; 0 where a mask drops the token."""
    return measure_policy_loss(logprobs_N, inputs, objective)[0]


def measure_policy_loss(
    logprobs_N: Tensor, inputs: LossInputs, objective: Objective
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Return `policy_loss`, and each token's named numbers of a loss of another package."""
    loss, numbers = objective.loss, dict[str, Tensor]()
    if isinstance(loss, OwnLoss):
        loss_N, numbers = own_loss(logprobs_N, inputs, loss)
    else:
        weigh = partial(weights, episodes_N=inputs.episodes_N, correction=objective.weight)
        loss_N = LOSSES[loss.kind][0](logprobs_N, inputs, loss, weigh)
    kept_N = _kept(logprobs_N, inputs, objective)
    # A token that is dropped here still counts in the normalisation, so a mask does not raise the weight of the others.
    return loss_N if kept_N is None else torch.where(kept_N, loss_N, 0.0), numbers


def policy_clipped(logprobs_N: Tensor, inputs: LossInputs, objective: Objective) -> Tensor:
    """Return the tokens that the trust region clips or a mask drops."""
    loss = objective.loss
    clip = never_clipped if isinstance(loss, OwnLoss) else LOSSES[loss.kind][1]
    clipped_N = clip(logprobs_N, inputs, loss)
    kept_N = _kept(logprobs_N, inputs, objective)
    return clipped_N if kept_N is None else clipped_N | ~kept_N


def importance(logprobs_N: Tensor, inputs: LossInputs) -> Tensor:
    """Return r = π/μ of each token."""
    return ratio(logprobs_N - inputs.logprobs_N)


def _kept(logprobs_N: Tensor, inputs: LossInputs, objective: Objective) -> Tensor | None:
    log_ratio_N = logprobs_N.detach() - inputs.logprobs_N
    return kept(log_ratio_N, inputs.advantages_N, inputs.episodes_N, objective.correction)


def _sequence(logprobs_N: Tensor, proximal_N: Tensor, inputs: LossInputs) -> Tensor:
    # In value the geometric mean of the episode; in gradient each token's own π/sg(π), which is 1.
    still_N = logprobs_N.detach()
    mean_N = episode_mean(still_N - proximal_N, inputs.episodes_N)
    return ratio(mean_N) * (logprobs_N - still_N).exp()


def _proximal(logprobs_N: Tensor, inputs: LossInputs, loss: DecoupledPpoLoss | GspoLoss) -> Tensor:
    """Return log π_prox: π at the start of the step (with a single update, π itself), or the version before it.

    The version before is approximated on the line from log μ to log π, at α = (v_prox − v_t) / (v − v_t), which saves
    a second forward pass (AReaL). For a fresh token it is μ: the policy that the step begins with sampled it.
    """
    if isinstance(loss, GspoLoss) or loss.proximal == "exact":
        return logprobs_N.detach() if loss.updates == 1 else inputs.proximal_N
    # A fresh token has lag 0, which would divide by 0; at lag 1 the factor is 0, and π_prox is μ.
    # V − v_t, at least 1: v_prox is v − 1.
    behind_N = inputs.lags_N.clamp(min=1).to(logprobs_N.dtype)
    return torch.lerp(inputs.logprobs_N, logprobs_N.detach(), (behind_N - 1.0) / behind_N)


def _clipped_surrogate(ratio_N: Tensor, inputs: LossInputs, loss: ClippedLoss | GspoLoss) -> Tensor:
    advantages_N = inputs.advantages_N
    clamped_N = ratio_N.clamp(1.0 - loss.low, 1.0 + loss.high)
    surrogate_N = torch.minimum(ratio_N * advantages_N, clamped_N * advantages_N)
    if loss.dual_clip is None:
        return surrogate_N
    # Where A < 0, PPO's minimum is r A however large r is: one token could outweigh the rest of the batch.
    bounded_N = torch.maximum(surrogate_N, loss.dual_clip * advantages_N)
    return torch.where(advantages_N < 0, bounded_N, surrogate_N)


def _beyond(ratio_N: Tensor, inputs: LossInputs, loss: ClippedLoss | GspoLoss) -> Tensor:
    good_N, bad_N = inputs.advantages_N > 0, inputs.advantages_N < 0
    out_N = (good_N & (ratio_N > 1.0 + loss.high)) | (bad_N & (ratio_N < 1.0 - loss.low))
    return out_N if loss.dual_clip is None else out_N | (bad_N & (ratio_N > loss.dual_clip))
