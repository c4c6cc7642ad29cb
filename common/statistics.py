"""What a small number of episodes says about a policy: means, intervals and pass@k. Pure functions."""

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean

Z_95 = NormalDist().inv_cdf(0.975)


def mean(values: Sequence[float]) -> float | None:
    """Return the mean, or None without values: 0 would be a claim."""
    return fmean(values) if values else None


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """Return the score interval of a proportion, 95 % wide; without trials it is (0, 1).

    E. B. Wilson, "Probable inference, the law of succession, and statistical inference", JASA 22 (1927). It assumes
    independent trials. Several episodes of one task are not quite independent, so their interval should be wider.
    """
    _check(successes, trials)
    if trials == 0:
        return 0.0, 1.0
    share, weight = successes / trials, Z_95 * Z_95 / trials
    middle = (share + weight / 2) / (1 + weight)
    half = math.sqrt(share * (1 - share) * weight + weight * weight / 4) / (1 + weight)
    # Exact at both ends, where rounding would miss it.
    low = 0.0 if successes == 0 else max(0.0, middle - half)
    return low, 1.0 if successes == trials else min(1.0, middle + half)


def newcombe(after: tuple[int, int], before: tuple[int, int]) -> tuple[float, float]:
    """Return the 95 % interval of the difference of two independent proportions, each as successes and trials.

    The square-and-add interval of two Wilson intervals: R. G. Newcombe, "Interval estimation for the difference between
    independent proportions", Statistics in Medicine 17 (1998), method 10. Without trials on a side it is (-1, 1).
    """
    if not after[1] or not before[1]:
        return -1.0, 1.0
    (one, (low_one, high_one)), (two, (low_two, high_two)) = (
        (successes / trials, wilson(successes, trials)) for successes, trials in (after, before)
    )
    low = one - two - math.hypot(one - low_one, high_two - two)
    return max(-1.0, low), min(1.0, one - two + math.hypot(high_one - one, two - low_two))


def paired_interval(differences: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the mean of differences in -1..1, one for each task that both sides played.

    A pair for either side is added, so that few tasks which all agree are no proof: after A. Agresti, Y. Min, "Simple
    improved confidence intervals for comparing matched proportions", Statistics in Medicine 24 (2005).
    """
    count = len(differences) + 2
    middle = sum(differences) / count
    variance = (
        sum(difference * difference for difference in differences) + 2
    ) / count - middle * middle
    half = Z_95 * math.sqrt(variance / count)
    return max(-1.0, middle - half), min(1.0, middle + half)


def pass_at_k(samples: int, successes: int, k: int) -> float:
    """Return the unbiased estimate of solving a task with one of k tries, from `successes` of `samples` tries.

    1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374, equation 1). Raises ValueError unless 1 <= k <= n.
    """
    _check(successes, samples)
    if not 1 <= k <= samples:
        raise ValueError(
            f"pass@{k} of {samples} samples: k lies between 1 and the number of samples"
        )
    # Exact integers until the division. `comb` is 0 when fewer than k tries failed, which makes the estimate 1.
    return 1.0 - math.comb(samples - successes, k) / math.comb(samples, k)


def _check(successes: int, trials: int) -> None:
    if not 0 <= successes <= trials:
        raise ValueError(
            f"{successes} successes in {trials} trials: a count lies between 0 and the number of trials"
        )
