import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from horizonrl.learner.advantage import ADVANTAGES, group_advantages

returns = st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=16)


def test_grpo_divides_by_the_population_std() -> None:
    assert_allclose(group_advantages("grpo", np.array([1.0, 0.0, 0.0, 1.0])), [1, -1, -1, 1], rtol=1e-5)


def test_dr_grpo_subtracts_the_mean_only() -> None:
    assert_allclose(group_advantages("dr_grpo", np.array([3.0, 1.0, 2.0])), [1, -1, 0], atol=1e-12)


def test_rloo_subtracts_the_mean_of_the_others() -> None:
    assert_allclose(group_advantages("rloo", np.array([6.0, 1.0, 2.0])), [4.5, -3, -1.5])


@given(returns)
def test_rloo_is_the_leave_one_out_baseline(values: list[float]) -> None:
    oracle = [R - np.mean(values[:i] + values[i + 1 :]) for i, R in enumerate(values)]
    assert_allclose(group_advantages("rloo", np.array(values)), oracle, atol=1e-9)


@pytest.mark.parametrize("kind", ADVANTAGES)
@given(values=returns, shift=st.floats(-10, 10))
def test_advantages_sum_to_zero_and_ignore_a_shift_of_the_reward(kind: str, values: list[float], shift: float) -> None:
    advantages_G = group_advantages(kind, np.array(values))
    assert_allclose(advantages_G.sum(), 0, atol=1e-6 * (1 + np.abs(advantages_G).max()))
    if np.std(values) > 1e-2:
        assert_allclose(group_advantages(kind, np.array(values) + shift), advantages_G, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_a_group_of_equal_returns_has_zero_advantages(kind: str) -> None:
    assert_allclose(group_advantages(kind, np.full(4, 0.5)), 0, atol=1e-9)


def test_a_group_without_a_baseline_is_refused() -> None:
    with pytest.raises(ValueError, match="fewer than 2 valid"):
        group_advantages("grpo", np.array([1.0]))


def test_an_unknown_kind_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="dr_grpo, grpo, rloo"):
        group_advantages("gae", np.array([1.0, 2.0]))
