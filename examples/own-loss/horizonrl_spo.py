"""Simple Policy Optimization (arXiv 2401.16025): a quadratic penalty in place of PPO's clip."""

from torch import Tensor

from horizonrl.learner.algorithm.loss import LossInputs, importance


def spo(
    logprobs_N: Tensor, inputs: LossInputs, *, epsilon: float = 0.2
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return −(r A − |A| (r − 1)² / 2ε) of each token, and its penalty."""
    ratio_N, advantages_N = importance(logprobs_N, inputs), inputs.advantages_N
    penalty_N = advantages_N.abs() * (ratio_N - 1.0) ** 2 / (2.0 * epsilon)
    return penalty_N - ratio_N * advantages_N, {"spo_penalty": penalty_N}
