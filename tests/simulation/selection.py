"""Does training select by duration? Over many runs, slow tasks must be trained as often as quick ones."""

import math
from collections.abc import Sequence


def selection(durations: Sequence[tuple[float, bool]]) -> dict[str, float]:
    """Return the trained shares of the quicker and the slower half of the tickets, and how far apart they are.

    `z` is the difference in standard errors: beyond 4, chance is no explanation.
    """
    ordered = sorted(durations)
    half = len(ordered) // 2
    if not half:
        return {}
    quick, slow = ([trained for _, trained in part] for part in (ordered[:half], ordered[-half:]))
    shares = [sum(part) / half for part in (quick, slow)]
    pooled = sum(shares) / 2
    error = math.sqrt(2 * pooled * (1 - pooled) / half)
    difference = shares[0] - shares[1]
    return {
        "tickets": len(ordered),
        "quick": round(shares[0], 4),
        "slow": round(shares[1], 4),
        "z": round(difference / error, 2) if error else 0.0,
    }
