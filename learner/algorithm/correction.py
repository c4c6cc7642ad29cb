"""Weights and masks for tokens that were sampled by another policy than the one in training.

Place in the flow: micro-batch → **correction** → loss. Pure functions of torch tensors; none carries a gradient. A
weight is for losses whose ratio does not contain π/μ; a mask, 0 or 1, works with any loss. Axis: N,
the trained tokens of one micro-batch; `episodes_N` numbers their episodes, none of which is ever split.
"""

import torch
from torch import Tensor

from horizonrl.common.config.objective import (
    CorrectionSection,
    IcepopCorrection,
    OwnCorrection,
    SequenceCorrection,
    TokenCorrection,
)
from horizonrl.learner.algorithm.own import own_weights

LOG_RATIO_BOUND = 20.0
"""Largest |log r|: exp must stay finite in float32, because infinity times a zero gradient is NaN."""


@torch.no_grad()
def weights(
    log_ratio_N: Tensor, episodes_N: Tensor, correction: CorrectionSection | None
) -> Tensor:
    """Return each token's weight by the kind of `correction`; 1 without one."""
    match correction:
        case TokenCorrection():
            return token_truncation(log_ratio_N, correction.cap)
        case SequenceCorrection():
            return sequence_truncation(log_ratio_N, episodes_N, correction.cap)
        case IcepopCorrection():
            return icepop(log_ratio_N, correction.band)
        case OwnCorrection():
            return own_weights(log_ratio_N, episodes_N, correction)
        # So it is for every loss whose ratio is π/μ: a weight would count the difference from μ twice.
        case _:
            return torch.ones_like(log_ratio_N)


@torch.no_grad()
def kept(
    log_ratio_N: Tensor, advantages_N: Tensor, episodes_N: Tensor, settings: CorrectionSection
) -> Tensor | None:
    """Return the tokens that pass every mask in use; None if no mask is in use."""
    masks = []
    if settings.geometric_band is not None:
        masks.append(geometric_mask(log_ratio_N, episodes_N, settings.geometric_band))
    if settings.k3_max is not None:
        masks.append(k3_mask(log_ratio_N, episodes_N, settings.k3_max))
    if settings.veto_band is not None:
        masks.append(veto_mask(log_ratio_N, episodes_N, settings.veto_band))
    if settings.stale_negative_max is not None:
        masks.append(
            stale_negative_mask(log_ratio_N, advantages_N, episodes_N, settings.stale_negative_max)
        )
    return torch.stack(masks).all(0) if masks else None


def token_truncation(log_ratio_N: Tensor, cap: float) -> Tensor:
    """Return min(r, cap) (truncated importance sampling, TIS)."""
    return ratio(log_ratio_N).clamp(max=cap)


def sequence_truncation(log_ratio_N: Tensor, episodes_N: Tensor, cap: float) -> Tensor:
    """Return min(Π r over the episode, cap). A long episode's product says little: 1.1^100 is 13,780."""
    return ratio(episode_sum(log_ratio_N, episodes_N)).clamp(max=cap)


def icepop(log_ratio_N: Tensor, band: tuple[float, float]) -> Tensor:
    """Return r inside the band and 0 outside it (IcePop)."""
    r_N = ratio(log_ratio_N)
    return torch.where(_inside(r_N, band), r_N, torch.zeros_like(r_N))


def geometric_mask(log_ratio_N: Tensor, episodes_N: Tensor, band: tuple[float, float]) -> Tensor:
    """Keep the episodes whose geometric mean of r lies in the band."""
    return _inside(ratio(episode_mean(log_ratio_N, episodes_N)), band)


def k3_mask(log_ratio_N: Tensor, episodes_N: Tensor, bound: float) -> Tensor:
    """Keep the episodes whose k3 estimate of KL(μ ‖ π), the mean of r − log r − 1, is at most the bound."""
    r_N = ratio(log_ratio_N)
    return episode_mean(r_N - r_N.log() - 1.0, episodes_N) <= bound


def veto_mask(log_ratio_N: Tensor, episodes_N: Tensor, band: tuple[float, float]) -> Tensor:
    """Keep the episodes in which every r lies in the band."""
    outside_N = ~_inside(ratio(log_ratio_N), band)
    return episode_sum(outside_N.to(log_ratio_N.dtype), episodes_N) == 0


def stale_negative_mask(
    log_ratio_N: Tensor, advantages_N: Tensor, episodes_N: Tensor, bound: float
) -> Tensor:
    """Drop the tokens with A < 0 of the episodes whose mean of log μ − log π is above the bound."""
    # Positive advantages always stay: stale negatives are the dangerous ones.
    return (advantages_N >= 0) | (-episode_mean(log_ratio_N, episodes_N) <= bound)


def ratio(log_ratio_N: Tensor) -> Tensor:
    """Return exp of the log-ratio, bounded so that it stays finite in float32."""
    return log_ratio_N.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def episode_sum(values_N: Tensor, episodes_N: Tensor) -> Tensor:
    """Return for each token the sum over its episode."""
    # A micro-batch may hold nothing but padding: a rank with less to do still takes part in every collective.
    episodes = int(episodes_N.max()) + 1 if episodes_N.numel() else 0
    return values_N.new_zeros(episodes).index_add(0, episodes_N, values_N)[episodes_N]


def episode_mean(values_N: Tensor, episodes_N: Tensor) -> Tensor:
    """Return for each token the mean over its episode."""
    return episode_sum(values_N, episodes_N) / episode_sum(torch.ones_like(values_N), episodes_N)


def _inside(values_N: Tensor, band: tuple[float, float]) -> Tensor:
    return (values_N >= band[0]) & (values_N <= band[1])
