"""The losses against a second implementation in NumPy float64, by hand, and by finite differences."""

import math
from dataclasses import astuple, fields

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from numpy.typing import NDArray

from horizonrl.learner.loss import (
    Behaviour,
    LossSettings,
    Tally,
    imitation_loss,
    imitation_tally,
    ppo_loss,
    ppo_stopped,
    ppo_tally,
)

settings_of = st.builds(
    LossSettings,
    clip_low=st.floats(0.0, 0.9),
    clip_high=st.floats(0.0, 2.0),
    dual_clip=st.none() | st.floats(1.1, 5.0),
    importance_cap=st.none() | st.floats(1.0, 5.0),
)
token = st.tuples(st.floats(-30, 0), st.floats(-30, 0), st.floats(-5, 5), st.booleans())
tokens = st.lists(token, min_size=1, max_size=30)


def oracle_loss(logprob: float, mu: float, advantage: float, settings: LossSettings) -> float:
    """One token of the PPO loss, as the formula reads."""
    ratio = math.exp(min(20.0, max(-20.0, logprob - mu)))
    if settings.importance_cap is not None:
        ratio = min(ratio, settings.importance_cap)
    clipped = min(max(ratio, 1 - settings.clip_low), 1 + settings.clip_high)
    objective = min(ratio * advantage, clipped * advantage)
    if advantage < 0 and settings.dual_clip is not None:
        objective = max(objective, settings.dual_clip * advantage)
    return -objective


def columns(rows: list[tuple[float, float, float, bool]]) -> tuple[torch.Tensor, Behaviour]:
    logprobs, mu, advantages, fresh = zip(*rows, strict=True)
    double = [torch.tensor(column, dtype=torch.float64) for column in (logprobs, mu, advantages)]
    lags_N = (~torch.tensor(fresh)).int()
    return double[0].requires_grad_(), Behaviour(double[1], double[2], lags_N, torch.zeros(len(rows)).long())


def one(logprob: float, mu: float, advantage: float, settings: LossSettings = LossSettings()) -> tuple[float, float]:  # noqa: B008
    """Return loss and gradient of one token."""
    logprobs_N, behaviour = columns([(logprob, mu, advantage, True)])
    loss_N = ppo_loss(logprobs_N, behaviour, settings)
    loss_N.sum().backward()
    assert logprobs_N.grad is not None
    return loss_N.item(), logprobs_N.grad.item()


@given(tokens, settings_of)
def test_the_ppo_loss_equals_the_oracle(rows: list[tuple[float, float, float, bool]], settings: LossSettings) -> None:
    logprobs_N, behaviour = columns(rows)
    oracle_N = [oracle_loss(logprob, mu, advantage, settings) for logprob, mu, advantage, _ in rows]
    assert_allclose(ppo_loss(logprobs_N, behaviour, settings).detach(), oracle_N, rtol=1e-9, atol=1e-12)


@given(st.tuples(st.floats(-3, 0), st.floats(-3, 0), st.floats(-5, 5), st.booleans()), settings_of)
def test_the_gradient_equals_finite_differences_away_from_kinks(
    row: tuple[float, float, float, bool], settings: LossSettings
) -> None:
    logprob, mu, advantage, _ = row
    step = 1e-5
    bounds = [1 - settings.clip_low, 1 + settings.clip_high, settings.dual_clip, settings.importance_cap]
    if any(bound and abs(math.exp(logprob - mu) - bound) < 1e-3 for bound in bounds):
        return
    above, below = (oracle_loss(logprob + sign * step, mu, advantage, settings) for sign in (1, -1))
    truncated = settings.importance_cap is not None and math.exp(logprob - mu) > settings.importance_cap
    if not truncated:  # a truncated token keeps its gradient on purpose
        assert one(logprob, mu, advantage, settings)[1] == pytest.approx((above - below) / (2 * step), abs=1e-4)


@given(tokens, settings_of)
def test_stopped_tokens_are_those_without_gradient(
    rows: list[tuple[float, float, float, bool]], settings: LossSettings
) -> None:
    rows = [row for row in rows if abs(row[2]) > 1e-3 and abs(row[0] - row[1]) < 19]
    if not rows:
        return
    logprobs_N, behaviour = columns(rows)
    ppo_loss(logprobs_N, behaviour, settings).sum().backward()
    assert logprobs_N.grad is not None
    stopped_N = ppo_stopped(logprobs_N, behaviour, settings)
    ratio_N = (logprobs_N - behaviour.logprobs_N).exp()
    at_a_kink_N = torch.zeros_like(stopped_N)
    caps = [settings.importance_cap] if settings.importance_cap is not None else []
    for bound in (1 - settings.clip_low, 1 + settings.clip_high, settings.dual_clip, *caps):
        for value_N in (ratio_N, ratio_N.clamp(max=caps[0]) if caps else ratio_N):
            at_a_kink_N |= (value_N - (bound or -1)).abs() < 1e-9
    agree_N = (logprobs_N.grad == 0) == stopped_N
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


def test_the_dual_clip_bounds_what_a_bad_token_may_do() -> None:
    assert one(math.log(0.5), math.log(0.1), -1.0) == (pytest.approx(3.0), 0.0)
    assert one(math.log(0.5), math.log(0.1), -1.0, LossSettings(dual_clip=None))[1] == pytest.approx(5.0)


def test_a_truncated_token_weighs_as_much_as_the_cap() -> None:
    settings = LossSettings(dual_clip=None, importance_cap=2.0)
    assert one(math.log(0.5), math.log(0.1), -1.0, settings) == (pytest.approx(2.0), pytest.approx(2.0))


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("logprobs", [(0.0, -200.0), (-200.0, 0.0)])
def test_impossible_ratios_stay_finite(logprobs: tuple[float, float], advantage: float) -> None:
    logprobs_N = torch.tensor([logprobs[0]], requires_grad=True)
    zero = torch.tensor([0])
    behaviour = Behaviour(torch.tensor([logprobs[1]]), torch.tensor([advantage]), zero, zero)
    loss_N = ppo_loss(logprobs_N, behaviour, LossSettings())
    loss_N.sum().backward()
    assert logprobs_N.grad is not None
    assert torch.isfinite(loss_N).all() and torch.isfinite(logprobs_N.grad).all()


def test_imitation_is_the_negative_log_likelihood() -> None:
    assert imitation_loss(torch.tensor([-1.0, -2.0])).tolist() == [1.0, 2.0]


def ppo_tally_of(rows: list[tuple[float, float, float, bool]], settings: LossSettings) -> Tally:
    logprobs_N, behaviour = columns(rows)
    loss_N = ppo_loss(logprobs_N, behaviour, settings)
    return ppo_tally(loss_N, -logprobs_N.detach(), logprobs_N, behaviour, settings)


@given(tokens, settings_of)
def test_the_tally_equals_the_oracle(rows: list[tuple[float, float, float, bool]], settings: LossSettings) -> None:
    tally = ppo_tally_of(rows, settings)
    table: NDArray[np.float64] = np.array(rows, dtype=np.float64)
    log_ratio_N = (table[:, 0] - table[:, 1]).clip(-20, 20)
    ratio_N, fresh_N = np.exp(log_ratio_N), table[:, 3]
    gap_N = np.abs(table[:, 0] - table[:, 1])
    oracle = {
        "tokens": len(rows),
        "compared": len(rows),
        "entropy": -table[:, 0].sum(),
        "loss": sum(oracle_loss(logprob, mu, advantage, settings) for logprob, mu, advantage, _ in rows),
        "kl": (ratio_N - 1 - log_ratio_N).sum(),
        "gap": gap_N.sum(),
        "fresh": fresh_N.sum(),
        "gap_fresh": (gap_N * fresh_N).sum(),
        "importance": ratio_N.sum(),
        "importance_squared": (ratio_N**2).sum(),
        "importance_max": ratio_N.max(),
    }
    for name, value in oracle.items():
        assert getattr(tally, name) == pytest.approx(value, rel=1e-9, abs=1e-9), name
    assert tally.ess == pytest.approx(ratio_N.sum() ** 2 / (len(rows) * (ratio_N**2).sum()))
    assert 1 / len(rows) - 1e-9 <= tally.ess <= 1 + 1e-9


@given(tokens, tokens, settings_of)
def test_tallies_add_up_like_their_tokens(
    first: list[tuple[float, float, float, bool]],
    second: list[tuple[float, float, float, bool]],
    settings: LossSettings,
) -> None:
    parts = ppo_tally_of(first, settings) + ppo_tally_of(second, settings) + Tally()
    assert_allclose(astuple(parts), astuple(ppo_tally_of(first + second, settings)), rtol=1e-9, atol=1e-9)


def test_an_empty_micro_batch_adds_nothing() -> None:
    nothing = torch.empty(0)
    tally = ppo_tally(nothing, nothing, nothing, Behaviour(nothing, nothing, nothing, nothing.long()), LossSettings())
    assert tally == Tally()
    assert imitation_tally(nothing, nothing) == Tally()


def test_imitation_compares_with_no_behaviour_policy() -> None:
    tally = imitation_tally(torch.tensor([1.0, 3.0]), torch.tensor([0.5, 0.5]))
    assert (tally.tokens, tally.loss, tally.entropy, tally.compared) == (2, 4, 1, 0)
    assert math.isnan(tally.ess)


def test_the_largest_ratio_is_the_last_field_of_a_tally() -> None:
    assert [field.name for field in fields(Tally)][-1] == "importance_max"
