"""The loss against its formula, token by token."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from horizonrl_spo import spo


def make_inputs(logprobs: Any, advantages: Any) -> Any:
    return SimpleNamespace(logprobs_N=torch.tensor(logprobs), advantages_N=torch.tensor(advantages))


def test_spo_is_the_surrogate_with_a_quadratic_penalty() -> None:
    logprobs, behaviour, advantages = np.random.default_rng(0).normal(-1.0, 0.3, (3, 100))
    ratio = np.exp(logprobs - behaviour)
    penalty = np.abs(advantages) * (ratio - 1.0) ** 2 / (2 * 0.2)
    loss, numbers = spo(torch.tensor(logprobs), make_inputs(behaviour, advantages), epsilon=0.2)
    np.testing.assert_allclose(loss, penalty - ratio * advantages, rtol=1e-12)
    np.testing.assert_allclose(numbers["spo_penalty"], penalty, rtol=1e-12)


def test_the_gradient_of_a_fresh_token_is_its_advantage() -> None:
    logprobs = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    spo(logprobs, make_inputs([0.0, 0.0], [1.0, -2.0]))[0].sum().backward()
    assert logprobs.grad is not None
    np.testing.assert_allclose(logprobs.grad, [-1.0, 2.0])
