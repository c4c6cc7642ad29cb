"""What follows a turn, and how it compares with the same point of other episodes. Pure functions of NumPy arrays.

Axes: S any sequence of steps, K the turns of one episode, N its trained tokens, T places of tokens.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

CERTAIN = 1e-4
"""Weight of a path on which the policy was certain of every token, so that a group of such paths has a plain mean. It
lies above the rounding of float32 probabilities, 1e-6, and far below one uncertain token, 0.1 and more."""


def to_go(rewards_S: Floats, discount: float) -> Floats:
    """Return Σ_{j≥s} γ^{j−s} r_j of every step s."""
    returns_S, ahead = np.empty_like(rewards_S), 0.0
    for s in reversed(range(len(rewards_S))):
        returns_S[s] = ahead = rewards_S[s] + discount * ahead
    return returns_S


def by_state(
    rewards: Sequence[Floats],
    states: Sequence[Sequence[str]],
    compare: Callable[[Floats], Floats],
    discount: float,
) -> list[Floats]:
    """Compare the return from each turn on with those of the group's other turns in the same state.

    The step level of GiGPO (arXiv 2505.10978). A turn without a state, or alone in its state, gets 0.
    """
    ahead = [to_go(rewards_K, discount) for rewards_K in rewards]
    visits: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for e, states_K in enumerate(states):
        for k, state in enumerate(states_K):
            if state:
                visits[state].append((e, k))
    beside = [np.zeros_like(ahead_K) for ahead_K in ahead]
    for places in visits.values():
        if len(places) > 1:
            compared = compare(np.array([ahead[e][k] for e, k in places]))
            for (e, k), value in zip(places, compared, strict=True):
                beside[e][k] = value
    return beside


def optimal_token_baseline(returns: Sequence[Floats], energies: Sequence[Floats]) -> list[Floats]:
    """Return G_t − B_t of each episode of a group, float64 [N] each, B_t = Σ G_t W_t / Σ W_t (OTB, arXiv 2602.07078).

    `returns` are G, and `energies` 1 − 2 π + Σ π² of each token: the squared norm of its gradient with respect to the
    logits, and so at least 0; what rounding puts below counts as 0. W_t is their sum up to the token, so that a path
    weighs as much as its gradient varies. The sums of B_t are
    over the episodes that have a t-th token; where one alone does, B_t is its own return and teaches nothing.
    """
    weighed_T, weights_T = np.zeros((2, max(map(len, returns))))
    for returns_N, energies_N in zip(returns, energies, strict=True):
        weights_N = np.cumsum(np.maximum(energies_N, 0.0)) + CERTAIN
        weighed_T[: len(weights_N)] += returns_N * weights_N
        weights_T[: len(weights_N)] += weights_N
    return [
        np.asarray(returns_N - (weighed_T / weights_T)[: len(returns_N)]) for returns_N in returns
    ]
