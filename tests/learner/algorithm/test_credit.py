"""The optimal token baseline by itself; test_advantage.py has its oracle within a batch."""

import numpy as np
from numpy.testing import assert_allclose

from horizonrl.learner.algorithm.advantage import has_signal
from horizonrl.learner.algorithm.credit import optimal_token_baseline
from tests.learner.sections import make_advantage


def test_the_optimal_token_baseline_is_the_plain_mean_for_equal_paths_and_has_the_least_variance() -> (
    None
):
    returns = [np.full(3, reward) for reward in (1.0, 0.0, 0.0)]
    for energy in (0.0, 0.5):
        made = optimal_token_baseline(returns, [np.full(3, energy)] * 3)
        assert_allclose(made, [[2 / 3] * 3, [-1 / 3] * 3, [-1 / 3] * 3])
    # A path's gradient varies as its energy: the mean square of (G − B) times the energy is least at B.
    energies = np.array([0.9, 0.1, 0.4])
    rewards = np.array([1.0, 0.0, 3.0])
    best = rewards[0] - optimal_token_baseline(rewards[:, None], energies[:, None])[0][0]

    def spread(baseline: float) -> float:
        return float((energies * (rewards - baseline) ** 2).mean())

    assert spread(best) < min(spread(best + 0.01), spread(best - 0.01), spread(rewards.mean()))
    longer = optimal_token_baseline([np.ones(2), np.zeros(1)], [np.ones(2), np.ones(1)])
    assert_allclose(longer[0], [0.5, 0.0], atol=1e-12)  # alone at its second token


def test_rounding_below_zero_gives_a_path_no_negative_weight() -> None:
    """1 − 2 π + Σ π² of a certain token is 0 up to float32's rounding, on either side."""
    made = optimal_token_baseline(
        [np.ones(1), np.zeros(1)], [np.full(1, -3e-6), np.full(1, 3.1e-6)]
    )
    assert_allclose(1.0 - made[0], 0.5, atol=0.05)


def test_equal_episodes_teach_nothing_although_their_turns_are_credited_apart() -> None:
    by_turn = make_advantage(credit="turn", discount=0.9)
    assert not has_signal([[0.0, 1.0]] * 4, by_turn)
    assert has_signal([[0.0, 1.0]] * 3 + [[0.0, 0.0, 1.0]], by_turn)
    assert has_signal([[0.0, 1.0], [1.0, 0.0]], by_turn)
    assert has_signal([[], [], [1.0, 0.0]], by_turn), (
        "an episode may have ended before its first turn"
    )
