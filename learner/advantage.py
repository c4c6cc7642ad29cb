"""Returns become advantages: how much better each episode of a group did than its siblings.

Place in the flow: Group → **advantages** → Batch. Pure functions of NumPy arrays; no torch. Axis: G, the valid
episodes of one group. A kind is added by writing its function and naming it in `ADVANTAGES`.
"""

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Advantage = Callable[[Floats], Floats]

STD_FLOOR = 1e-6
"""Added to the standard deviation: a group whose returns are equal gets zeros, not NaN."""


def grpo(returns_G: Floats) -> Floats:
    """Return (R − mean) / (std + 1e-6), with the population's std (DeepSeekMath, arXiv 2402.03300, section 4.1.2)."""
    return np.asarray((returns_G - returns_G.mean()) / (returns_G.std() + STD_FLOOR))


def dr_grpo(returns_G: Floats) -> Floats:
    """Return R − mean: without the division that favours easy and hard tasks (Dr. GRPO, arXiv 2503.20783)."""
    return np.asarray(returns_G - returns_G.mean())


def rloo(returns_G: Floats) -> Floats:
    """Return R minus the mean of the others: an unbiased baseline (RLOO, arXiv 2402.14740)."""
    return dr_grpo(returns_G) * (returns_G.size / (returns_G.size - 1))


ADVANTAGES: Mapping[str, Advantage] = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}


def group_advantages(kind: str, returns_G: Floats) -> Floats:
    """Return the advantage of each episode of one group, in order; raise ValueError for a group without a baseline."""
    if kind not in ADVANTAGES:
        raise ValueError(f"no advantage kind {kind!r}: choose one of {', '.join(sorted(ADVANTAGES))}")
    returns_G = np.asarray(returns_G, dtype=np.float64)
    if returns_G.ndim != 1 or returns_G.size < 2:
        raise ValueError(
            f"returns of shape {returns_G.shape} make no baseline: drop groups with fewer than 2 valid episodes"
        )
    return ADVANTAGES[kind](returns_G)
