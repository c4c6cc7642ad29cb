import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horizonrl.common.statistics import Z_95, newcombe, paired_interval, pass_at_k, wilson


@st.composite
def counts(draw: st.DrawFn, least: int = 0) -> tuple[int, int]:
    """Return (successes, trials)."""
    trials = draw(st.integers(least, 500))
    return draw(st.integers(0, trials)), trials


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        (0, 10, 0.0, Z_95**2 / (10 + Z_95**2)),  # the closed form without a success
        (10, 10, 10 / (10 + Z_95**2), 1.0),
        (5, 10, 0.2366, 0.7634),  # R: prop.test(5, 10, correct = FALSE)
        (81, 263, 0.2553, 0.3662),  # Newcombe 1998, table I, method 3
        (15, 148, 0.0624, 0.1605),
        (1, 29, 0.0061, 0.1718),
        (0, 0, 0.0, 1.0),
    ],
)
def test_the_interval_is_the_published_one(
    successes: int, trials: int, low: float, high: float
) -> None:
    assert wilson(successes, trials) == pytest.approx((low, high), abs=5e-5)


@given(counts(least=1))
def test_the_interval_holds_the_proportions_that_a_score_test_accepts(
    count: tuple[int, int],
) -> None:
    successes, trials = count
    for bound in wilson(successes, trials):
        score = abs(successes / trials - bound)
        assert score == pytest.approx(Z_95 * math.sqrt(bound * (1 - bound) / trials), abs=1e-9)


@given(counts())
def test_the_interval_lies_within_0_and_1_around_the_share_and_mirrors_its_failures(
    count: tuple[int, int],
) -> None:
    successes, trials = count
    low, high = wilson(successes, trials)
    assert 0 <= low < high <= 1
    assert low <= (successes / trials if trials else 0.5) <= high
    assert wilson(trials - successes, trials) == pytest.approx((1 - high, 1 - low), abs=1e-9)


@given(st.integers(1, 9), st.data())
def test_pass_at_k_is_the_share_of_the_choices_of_k_that_hold_a_success(
    samples: int, data: st.DataObject
) -> None:
    successes, k = data.draw(st.integers(0, samples)), data.draw(st.integers(1, samples))
    choices = list(itertools.combinations([1] * successes + [0] * (samples - successes), k))
    assert pass_at_k(samples, successes, k) == pytest.approx(sum(map(any, choices)) / len(choices))


@given(counts(least=1))
def test_pass_at_1_is_the_success_rate(count: tuple[int, int]) -> None:
    successes, trials = count
    assert pass_at_k(trials, successes, 1) == pytest.approx(successes / trials)


@pytest.mark.parametrize(
    "wrong", [lambda: wilson(3, 2), lambda: wilson(-1, 2), lambda: pass_at_k(2, 1, 3)]
)
def test_counts_that_cannot_be_are_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="between"):
        wrong()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("after", "before", "low", "high"),
    [  # Newcombe 1998, table II, method 10
        ((56, 70), (48, 80), 0.0524, 0.3339),
        ((9, 10), (3, 10), 0.1705, 0.8090),
        ((6, 7), (2, 7), 0.0582, 0.8062),
        ((5, 56), (0, 29), -0.0381, 0.1926),
        ((0, 10), (0, 20), -0.1611, 0.2775),
        ((10, 10), (0, 20), 0.6791, 1.0),
        ((0, 0), (3, 4), -1.0, 1.0),
    ],
)
def test_the_interval_of_a_difference_is_the_published_one(
    after: tuple[int, int], before: tuple[int, int], low: float, high: float
) -> None:
    assert newcombe(after, before) == pytest.approx((low, high), abs=5e-5)
    assert newcombe(before, after) == pytest.approx((-high, -low), abs=5e-5)


@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 60))
def test_the_interval_of_pairs_is_walds_with_a_pair_more_for_either_side(
    better: int, worse: int, same: int
) -> None:
    """In terms of the counts of matched pairs that differ, with the variance of a multinomial."""
    n, b, c = better + worse + same + 2, better + 1, worse + 1
    middle, half = (b - c) / n, Z_95 * math.sqrt(b + c - (b - c) ** 2 / n) / n
    found = paired_interval([1.0] * better + [-1.0] * worse + [0.0] * same)
    assert found == pytest.approx((max(-1.0, middle - half), min(1.0, middle + half)))


def test_few_tasks_that_all_agree_are_no_proof() -> None:
    assert paired_interval([1.0] * 3)[0] < 0 < paired_interval([1.0] * 8)[0]
    assert paired_interval([]) == (-1.0, 1.0)
