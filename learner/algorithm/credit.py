"""What follows a turn, and how it compares with the same point of other episodes. Pure functions of NumPy arrays.

Axes: S any sequence of steps, K the turns of one episode.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def to_go(rewards_S: Floats, discount: float) -> Floats:
    """Return Σ_{j≥s} γ^{j−s} r_j of every step s."""
    returns_S, ahead = np.empty_like(rewards_S), 0.0
    for s in reversed(range(len(rewards_S))):
        returns_S[s] = ahead = rewards_S[s] + discount * ahead
    return returns_S


def by_state(
    rewards: Sequence[Floats], states: Sequence[Sequence[str]], compare: Callable[[Floats], Floats], discount: float
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
