"""What is known of a micro-batch's tokens, with the rest filled in."""

import torch
from torch import Tensor

from horizonrl.learner.algorithm.loss import LossInputs


def known(
    logprobs_N: Tensor, advantages_N: Tensor, lags_N: Tensor, episodes_N: Tensor, **columns: Tensor
) -> LossInputs:
    """Tokens of no demonstration, each of which counts 1; without proximal policy, reference or targets."""
    nothing_N = torch.zeros_like(logprobs_N)
    filled = {
        "demo_N": torch.zeros_like(lags_N, dtype=torch.bool),
        "scales_N": torch.ones_like(logprobs_N),
        "proximal_N": nothing_N,
        "reference_N": nothing_N,
        "targets_N": nothing_N + torch.nan,
    }
    episodes = int(episodes_N.max()) + 1 if len(episodes_N) else 0
    return LossInputs(
        logprobs_N, advantages_N, lags_N, episodes_N, **filled | columns, episodes=episodes
    )
