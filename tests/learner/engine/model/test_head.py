"""The head's scores and gradients against log_softmax, and against themselves in other chunks of tokens."""

import pytest
import torch
from numpy.testing import assert_allclose
from torch import Tensor, nn

from horizonrl.learner.engine.model import head
from horizonrl.learner.engine.model.head import CHUNK_ROWS, ScoringHead, collisions

ROWS = CHUNK_ROWS["cpu"]


def scores_of(logits_NV: Tensor, ids_N: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies from a head that hands its input through."""
    identity = nn.Linear(logits_NV.shape[1], logits_NV.shape[1], bias=False, dtype=logits_NV.dtype)
    nn.init.eye_(identity.weight)
    logprobs_N, entropies_N, _ = ScoringHead(identity, 1.0, False)(
        logits_NV, ids_N, torch.full((len(ids_N),), temperature, dtype=torch.float64)
    )
    return logprobs_N, entropies_N


@pytest.mark.parametrize("tokens", [1, ROWS, 2 * ROWS + 1])
def test_scores_and_gradient_equal_log_softmax(tokens: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    logits_NV = (
        torch.randn(tokens, 50, dtype=torch.float64, generator=generator).mul_(5).requires_grad_()
    )
    ids_N = torch.randint(50, (tokens,), generator=generator)
    oracle_NV = (logits_NV / 1.3).log_softmax(-1)
    weights_N = torch.randn(tokens, dtype=torch.float64, generator=generator)
    logprobs_N, entropies_N = scores_of(logits_NV, ids_N, 1.3)
    (gradient_NV,) = torch.autograd.grad(logprobs_N @ weights_N, logits_NV)
    (oracle_gradient_NV,) = torch.autograd.grad(
        oracle_NV.gather(1, ids_N[:, None])[:, 0] @ weights_N, logits_NV, retain_graph=True
    )
    assert_allclose(
        logprobs_N.detach(), oracle_NV.gather(1, ids_N[:, None])[:, 0].detach(), rtol=1e-9
    )
    assert_allclose(
        entropies_N.detach(), -(oracle_NV.exp() * oracle_NV).sum(-1).detach(), rtol=1e-9
    )
    assert_allclose(gradient_NV, oracle_gradient_NV, atol=1e-12)


@pytest.mark.parametrize("tokens", [0, 1, ROWS + 1])
def test_two_draws_are_the_same_token_as_often_as_the_squares_say(tokens: int) -> None:
    torch.manual_seed(tokens)
    logits_NV, temperatures_N = torch.randn(tokens, 50).mul_(5), torch.rand(tokens) + 0.5
    oracle_N = (logits_NV / temperatures_N[:, None]).double().softmax(-1).square().sum(-1)
    assert_allclose(collisions(logits_NV, temperatures_N), oracle_N, rtol=1e-5)


@pytest.mark.parametrize("tokens", [1, 33])
def test_the_gradient_of_the_entropy_equals_autograds(tokens: int) -> None:
    torch.manual_seed(1)
    logits_NV = torch.randn(tokens, 7, dtype=torch.float64, requires_grad=True)
    ids_N, pull_N = torch.randint(0, 7, (tokens,)), torch.randn(tokens, dtype=torch.float64)
    logprobs_N, entropies_N = scores_of(logits_NV, ids_N, 1.3)
    (gradient,) = torch.autograd.grad((logprobs_N * pull_N + 0.5 * entropies_N).sum(), logits_NV)
    oracle_NV = (logits_NV / 1.3).log_softmax(-1)
    oracle = (oracle_NV.gather(1, ids_N[:, None])[:, 0] * pull_N).sum() - 0.5 * (
        oracle_NV.exp() * oracle_NV
    ).sum()
    assert_allclose(gradient, torch.autograd.grad(oracle, logits_NV)[0], rtol=1e-9, atol=1e-12)


def test_extreme_logits_stay_finite() -> None:
    logits_NV = torch.tensor([[3e4, -3e4, 0.0]], dtype=torch.bfloat16, requires_grad=True)
    logprobs_N, entropies_N = scores_of(logits_NV, torch.tensor([1]))
    logprobs_N.sum().backward()
    assert logits_NV.grad is not None
    assert torch.isfinite(
        torch.cat([logprobs_N, entropies_N, logits_NV.grad.flatten().float()])
    ).all()


def test_a_token_that_is_ruled_out_leaves_entropy_and_gradients_finite() -> None:
    torch.manual_seed(0)
    few = nn.Linear(5, 6, dtype=torch.float64)
    linear = nn.Linear(5, 7, dtype=torch.float64)
    kept_V = torch.arange(7) != 4
    with torch.no_grad():
        linear.weight[kept_V], linear.bias[kept_V] = few.weight, few.bias
        linear.bias[4] = -torch.inf
    hidden_ND, temperatures_N = (
        torch.randn(3, 5, dtype=torch.float64, requires_grad=True),
        torch.full((3,), 0.7),
    )
    logprobs_N, entropies_N, _ = ScoringHead(linear, 1.0, False)(
        hidden_ND, torch.tensor([0, 1, 2]), temperatures_N
    )
    made = torch.autograd.grad(
        (logprobs_N + 0.5 * entropies_N).sum(), [hidden_ND, linear.weight, linear.bias]
    )
    oracle_NV = (few(hidden_ND) / 0.7).log_softmax(-1)  # the same model without the token
    oracle_entropies_N = -(oracle_NV.exp() * oracle_NV).sum(-1)
    oracle = (
        oracle_NV.gather(1, torch.tensor([[0], [1], [2]])).sum() + 0.5 * oracle_entropies_N.sum()
    )
    asked = torch.autograd.grad(oracle, [hidden_ND, few.weight, few.bias])
    assert_allclose(entropies_N.detach(), oracle_entropies_N.detach(), rtol=1e-6)
    assert_allclose(made[0], asked[0], rtol=1e-5, atol=1e-8)
    for whole, without in zip(made[1:], asked[1:], strict=True):
        assert_allclose(whole[kept_V], without, rtol=1e-5, atol=1e-8)
        assert not whole[4].any()


def in_chunks(
    chunks: int, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype = torch.bfloat16
) -> list[Tensor]:
    """Return the gradients of 600 tokens for hidden states, weight and bias of a head with 5,000 ids."""
    tokens, ids = 600, 5000
    monkeypatch.setitem(head.LOGITS_BYTES, "cpu", -(-tokens // chunks) * ids * dtype.itemsize)
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(64, ids)
    for parameter in linear.parameters():
        nn.init.normal_(parameter, std=0.05, generator=generator)
    linear = linear.to(torch.bfloat16).to(dtype)
    hidden_ND = (
        torch.randn(tokens, 64, generator=generator).to(torch.bfloat16).to(dtype).requires_grad_()
    )
    ids_N = torch.randint(ids, (tokens,), generator=generator)
    pulls_N = torch.randn(tokens, generator=generator)
    logprobs_N, entropies_N, _ = ScoringHead(linear, 1.0, False)(
        hidden_ND, ids_N, torch.ones(tokens)
    )
    loss = (logprobs_N * pulls_N + 0.1 * entropies_N).sum()
    return [g.double() for g in torch.autograd.grad(loss, [hidden_ND, linear.weight, linear.bias])]


def test_gradients_are_rounded_once_in_however_many_chunks_tokens_are_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exact = in_chunks(1, monkeypatch, torch.float64)
    whole = in_chunks(1, monkeypatch)
    for chunks in (3, 25, 60):
        made = in_chunks(chunks, monkeypatch)
        for gradient, other, oracle in zip(made, whole, exact, strict=True):
            assert float((gradient - oracle).norm() / oracle.norm()) < 0.004, chunks
            # The order of float32 additions may tip a rounding to the next bfloat16 number, and that seldom.
            assert float((gradient != other).double().mean()) < 0.01, chunks
            assert float((gradient - other).norm() / other.norm()) < 3e-4, chunks


def test_a_frozen_head_gets_no_gradient_and_hands_one_on(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = nn.Linear(5, 7).requires_grad_(False)
    for chunk in (2, 100):
        monkeypatch.setitem(head.LOGITS_BYTES, "cpu", chunk * 7 * 4)
        hidden_ND = torch.ones(5, 5, requires_grad=True)
        ScoringHead(linear, 1.0, False)(hidden_ND, torch.arange(5), torch.ones(5))[
            0
        ].sum().backward()
        assert hidden_ND.grad is not None and hidden_ND.grad.any()
        assert linear.weight.grad is None and linear.bias.grad is None
