"""The losses against a second implementation in NumPy float64, by hand, and by finite differences."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from numpy.typing import NDArray

from horizonrl.common.config.objective import Objective, PpoLoss
from horizonrl.learner.algorithm.loss import (
    KL_ESTIMATORS,
    LossInputs,
    imitation_loss,
    policy_clipped,
    policy_loss,
)
from horizonrl.learner.engine.model.model import ScorerOutput
from horizonrl.learner.engine.objective import LossStats, loss_stats, token_loss
from tests.learner.knowns import known
from tests.learner.sections import make_loss


@st.composite
def settings_drawn(draw: st.DrawFn) -> PpoLoss:
    high = draw(st.floats(0.0, 2.0))
    return make_loss(
        low=draw(st.floats(0.0, 0.9)),
        high=high,
        dual_clip=draw(st.none() | st.floats(1.1, 5.0)),
        cap=draw(st.none() | st.floats(1.0 + high, 5.0, exclude_min=True)),
    )


settings_of = settings_drawn()
token = st.tuples(st.floats(-30, 0), st.floats(-30, 0), st.floats(-5, 5), st.booleans())
tokens = st.lists(token, min_size=1, max_size=30)


def oracle_loss(logprob: float, mu: float, advantage: float, settings: PpoLoss) -> float:
    """One token of the PPO loss, as the formula reads."""
    ratio = math.exp(min(20.0, max(-20.0, logprob - mu)))
    if settings.cap is not None:
        ratio = min(ratio, settings.cap)
    clipped = min(max(ratio, 1 - settings.low), 1 + settings.high)
    objective = min(ratio * advantage, clipped * advantage)
    if advantage < 0 and settings.dual_clip is not None:
        objective = max(objective, settings.dual_clip * advantage)
    return -objective


def columns(rows: list[tuple[float, float, float, bool]]) -> tuple[torch.Tensor, LossInputs]:
    logprobs, mu, advantages, fresh = zip(*rows, strict=True)
    double = [torch.tensor(column, dtype=torch.float64) for column in (logprobs, mu, advantages)]
    lags_N = (~torch.tensor(fresh)).int()
    return double[0].requires_grad_(), known(double[1], double[2], lags_N, torch.arange(len(rows)))


PPO = make_loss()


def one(
    logprob: float, mu: float, advantage: float, settings: PpoLoss = PPO
) -> tuple[float, float]:
    """Return loss and gradient of one token."""
    logprobs_N, tokens_known = columns([(logprob, mu, advantage, True)])
    loss_N = policy_loss(logprobs_N, tokens_known, Objective(loss=settings))
    loss_N.sum().backward()
    assert logprobs_N.grad is not None
    return loss_N.item(), logprobs_N.grad.item()


@given(tokens, settings_of)
def test_the_ppo_loss_equals_the_oracle(
    rows: list[tuple[float, float, float, bool]], settings: PpoLoss
) -> None:
    logprobs_N, tokens_known = columns(rows)
    oracle_N = [oracle_loss(logprob, mu, advantage, settings) for logprob, mu, advantage, _ in rows]
    loss_N = policy_loss(logprobs_N, tokens_known, Objective(loss=settings))
    assert_allclose(loss_N.detach(), oracle_N, rtol=1e-9, atol=1e-12)


@given(st.tuples(st.floats(-3, 0), st.floats(-3, 0), st.floats(-5, 5), st.booleans()), settings_of)
def test_the_gradient_equals_finite_differences_away_from_kinks(
    row: tuple[float, float, float, bool], settings: PpoLoss
) -> None:
    logprob, mu, advantage, _ = row
    step = 1e-5
    bounds = [1 - settings.low, 1 + settings.high, settings.dual_clip, settings.cap]
    if any(bound and abs(math.exp(logprob - mu) - bound) < 1e-3 for bound in bounds):
        return
    above, below = (oracle_loss(logprob + sign * step, mu, advantage, settings) for sign in (1, -1))
    truncated = settings.cap is not None and math.exp(logprob - mu) > settings.cap
    if not truncated:  # a truncated token keeps its gradient on purpose
        assert one(logprob, mu, advantage, settings)[1] == pytest.approx(
            (above - below) / (2 * step), abs=1e-4
        )


@given(tokens, settings_of)
def test_stopped_tokens_are_those_without_gradient(
    rows: list[tuple[float, float, float, bool]], settings: PpoLoss
) -> None:
    rows = [row for row in rows if abs(row[2]) > 1e-3 and abs(row[0] - row[1]) < 19]
    if not rows:
        return
    logprobs_N, tokens_known = columns(rows)
    policy_loss(logprobs_N, tokens_known, Objective(loss=settings)).sum().backward()
    assert logprobs_N.grad is not None
    clipped_N = policy_clipped(logprobs_N, tokens_known, Objective(loss=settings))
    ratio_N = (logprobs_N - tokens_known.logprobs_N).exp()
    at_a_kink_N = torch.zeros_like(clipped_N)
    caps = [settings.cap] if settings.cap is not None else []
    for bound in (1 - settings.low, 1 + settings.high, settings.dual_clip, *caps):
        for value_N in (ratio_N, ratio_N.clamp(max=caps[0]) if caps else ratio_N):
            at_a_kink_N |= (value_N - (bound or -1)).abs() < 1e-9
    agree_N = (logprobs_N.grad == 0) == clipped_N
    assert (agree_N | at_a_kink_N).all()


def test_on_policy_the_gradient_is_the_policy_gradient() -> None:
    assert one(-1.0, -1.0, 2.0) == (-2.0, -2.0)
    assert one(-1.0, -1.0, -0.5) == (0.5, 0.5)


def test_a_good_token_that_has_gained_enough_gets_no_gradient() -> None:
    loss, gradient = one(math.log(0.6), math.log(0.3), 1.0)
    assert (loss, gradient) == (pytest.approx(-1.28), 0.0)


def test_a_bad_token_that_has_lost_enough_gets_no_gradient() -> None:
    loss, gradient = one(math.log(0.1), math.log(0.2), -1.0)
    assert (loss, gradient) == (pytest.approx(0.8), 0.0)


def test_a_bad_token_that_has_gained_is_pushed_back_with_its_ratio() -> None:
    loss, gradient = one(math.log(0.4), math.log(0.2), -1.0)
    assert (loss, gradient) == (pytest.approx(2.0), pytest.approx(2.0))


def test_a_truncated_token_weighs_as_much_as_the_cap() -> None:
    settings = make_loss(dual_clip=None, cap=2.0)
    assert one(math.log(0.5), math.log(0.1), -1.0, settings) == (
        pytest.approx(2.0),
        pytest.approx(2.0),
    )


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("logprobs", [(0.0, -200.0), (-200.0, 0.0)])
def test_impossible_ratios_stay_finite(logprobs: tuple[float, float], advantage: float) -> None:
    logprobs_N = torch.tensor([logprobs[0]], requires_grad=True)
    zero = torch.tensor([0])
    tokens_known = known(torch.tensor([logprobs[1]]), torch.tensor([advantage]), zero, zero)
    loss_N = policy_loss(logprobs_N, tokens_known, Objective())
    loss_N.sum().backward()
    assert logprobs_N.grad is not None
    assert torch.isfinite(loss_N).all() and torch.isfinite(logprobs_N.grad).all()


def test_imitation_is_the_negative_log_likelihood() -> None:
    assert imitation_loss(torch.tensor([-1.0, -2.0])).tolist() == [1.0, 2.0]


def tally_from(rows: list[tuple[float, float, float, bool]], settings: PpoLoss) -> LossStats:
    logprobs_N, tokens_known = columns(rows)
    output = ScorerOutput(logprobs_N, -logprobs_N.detach(), *torch.zeros(2, len(rows)))
    objective = Objective(loss=settings)
    return LossStats.total(
        [loss_stats(token_loss(output, tokens_known, objective), output, tokens_known, objective)]
    )


@given(tokens, settings_of)
def test_the_tally_equals_the_oracle(
    rows: list[tuple[float, float, float, bool]], settings: PpoLoss
) -> None:
    stats = tally_from(rows, settings)
    table: NDArray[np.float64] = np.array(rows, dtype=np.float64)
    log_ratio_N = (table[:, 0] - table[:, 1]).clip(-20, 20)
    ratio_N, fresh_N = np.exp(log_ratio_N), table[:, 3]
    gap_N = np.abs(table[:, 0] - table[:, 1])
    oracle = {
        "tokens": len(rows),
        "compared": len(rows),
        "entropy": -table[:, 0].sum(),
        "loss": sum(
            oracle_loss(logprob, mu, advantage, settings) for logprob, mu, advantage, _ in rows
        ),
        "kl": (ratio_N - 1 - log_ratio_N).sum(),
        "gap": gap_N.sum(),
        "fresh": fresh_N.sum(),
        "gap_fresh": (gap_N * fresh_N).sum(),
        "importance": ratio_N.sum(),
        "importance_squared": (ratio_N**2).sum(),
        "importance_max": ratio_N.max(),
        "episodes": len(rows),  # of one token each
        "log_product_max": (log_product_E := table[:, 0] - table[:, 1]).max(),
        "product": np.exp(log_product_E - log_product_E.max()).sum(),
        "product_squared": np.exp(2 * (log_product_E - log_product_E.max())).sum(),
    }
    for name, value in oracle.items():
        assert getattr(stats, name) == pytest.approx(value, rel=1e-9, abs=1e-9), name
    assert stats.ess == pytest.approx(ratio_N.sum() ** 2 / (len(rows) * (ratio_N**2).sum()))
    assert 1 / len(rows) - 1e-9 <= stats.ess <= 1 + 1e-9


@given(tokens, tokens, settings_of)
def test_tallies_add_up_like_their_tokens(
    first: list[tuple[float, float, float, bool]],
    second: list[tuple[float, float, float, bool]],
    settings: PpoLoss,
) -> None:
    parts = tally_from(first, settings) + tally_from(second, settings) + LossStats()
    whole = tally_from(first + second, settings)
    assert_allclose(parts.row(), whole.row(), rtol=1e-9, atol=1e-9)


def test_an_empty_micro_batch_adds_nothing() -> None:
    nothing = torch.empty(0)
    tokens_known = known(nothing, nothing, nothing, nothing.long())
    stats = LossStats.total(
        [loss_stats(nothing, ScorerOutput(*[nothing] * 4), tokens_known, Objective())]
    )
    assert stats == LossStats()


def test_demonstrations_are_cloned_and_compared_with_no_behaviour_policy() -> None:
    output = ScorerOutput(torch.tensor([-1.0, -3.0]), torch.tensor([0.5, 0.5]), *torch.zeros(2, 2))
    zero = torch.zeros(2)
    experts = known(zero, zero + 5, zero, zero.long(), demo_N=torch.tensor([True, True]))
    stats = LossStats.total(
        [loss_stats(token_loss(output, experts, Objective()), output, experts, Objective())]
    )
    assert (stats.tokens, stats.loss, stats.entropy, stats.compared) == (2, 4, 1, 0)
    assert math.isnan(stats.ess) and stats.kl == stats.gap == stats.importance == 0


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
@given(st.lists(st.tuples(st.floats(-5, 0), st.floats(-5, 0)), min_size=1))
def test_the_estimators_of_a_kl_equal_their_formulas(
    estimator: str, pairs: list[tuple[float, float]]
) -> None:
    logprobs_N, reference_N = torch.tensor(pairs, dtype=torch.float64).T
    log_ratio_N = logprobs_N.numpy() - reference_N.numpy()
    oracle = {
        "k1": log_ratio_N,
        "k2": log_ratio_N**2 / 2,
        "k3": np.exp(-log_ratio_N) - 1 + log_ratio_N,
    }
    assert_allclose(
        KL_ESTIMATORS[estimator](logprobs_N, reference_N), oracle[estimator], atol=1e-12
    )


@pytest.mark.parametrize("log_q", [-90.0, -20.5, -1.0, 0.0, 3.0, 19.9, 20.5, 60.0])
def test_k3_as_a_loss_draws_the_policy_to_the_reference_however_far(log_q: float) -> None:
    def oracle(log_q: float) -> float:
        # Its tangent from 20 on.
        q = math.exp(log_q) if log_q <= 20 else math.exp(20.0) * (log_q - 19.0)
        return q - 1 - log_q

    logprobs_N = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    k3_N = KL_ESTIMATORS["k3"](logprobs_N, torch.tensor([log_q - 1.0], dtype=torch.float64))
    (gradient,) = torch.autograd.grad(k3_N.sum(), logprobs_N)
    assert k3_N.item() == pytest.approx(oracle(log_q), rel=1e-9, abs=1e-9)
    slope = (oracle(log_q - 1e-6) - oracle(log_q + 1e-6)) / 2e-6  # of log π, which lowers log q
    assert gradient.item() == pytest.approx(slope, rel=1e-4, abs=1e-4)
    assert np.sign(gradient.item()) == -np.sign(log_q)


@given(
    st.lists(st.floats(-3, 3), min_size=2, max_size=6),
    st.lists(st.floats(-3, 3), min_size=2, max_size=6),
)
def test_k2_has_the_gradient_of_the_kl_on_average(mine: list[float], other: list[float]) -> None:
    V = min(len(mine), len(other))
    logits = torch.tensor(mine[:V], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor(other[:V], dtype=torch.float64).log_softmax(-1)
    logprobs = logits.log_softmax(-1)
    (exact,) = torch.autograd.grad(
        (logprobs.exp() * (logprobs - reference)).sum(), logits, retain_graph=True
    )
    (sampled,) = torch.autograd.grad(
        (logprobs.exp().detach() * KL_ESTIMATORS["k2"](logprobs, reference)).sum(), logits
    )
    assert_allclose(sampled, exact, atol=1e-9)


def test_the_largest_ratio_of_a_tally_is_no_sum() -> None:
    parts = LossStats(importance_max=2.0) + LossStats(importance_max=3.0)
    assert parts.importance_max == 3.0
