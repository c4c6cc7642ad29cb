"""The loss of spo.patch against the formula, token by token."""

from types import SimpleNamespace

import numpy as np
import torch

from horizonrl.learner.algorithm.loss import spo_loss

OBJECTIVE = SimpleNamespace(loss=SimpleNamespace(clip_low=0.2))


def test_spo_is_the_surrogate_with_a_quadratic_penalty() -> None:
    logprobs, behaviour, advantages = np.random.default_rng(0).normal(-1.0, 0.3, (3, 100))
    ratio = np.exp(logprobs - behaviour)
    expected = -(ratio * advantages - np.abs(advantages) * (ratio - 1.0) ** 2 / (2 * 0.2))
    known = SimpleNamespace(logprobs_N=torch.tensor(behaviour), advantages_N=torch.tensor(advantages))
    np.testing.assert_allclose(spo_loss(torch.tensor(logprobs), known, OBJECTIVE), expected, rtol=1e-12)


def test_the_gradient_of_a_fresh_token_is_its_advantage() -> None:
    logprobs = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    known = SimpleNamespace(logprobs_N=torch.zeros(2), advantages_N=torch.tensor([1.0, -2.0]))
    spo_loss(logprobs, known, OBJECTIVE).sum().backward()
    assert logprobs.grad is not None
    np.testing.assert_allclose(logprobs.grad, [-1.0, 2.0])
