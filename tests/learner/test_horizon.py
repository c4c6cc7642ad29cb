import pytest
from hypothesis import given
from hypothesis import strategies as st

from horizonrl.learner.horizon import horizon_turns

horizons = st.lists(st.integers(1, 100), min_size=1, max_size=5).map(lambda turns: tuple(sorted(turns)))


@pytest.mark.parametrize(
    ("step", "turns"), [(0, 10), (99, 10), (100, 20), (101, 20), (199, 20), (200, 30), (299, 30), (100_000, 30)]
)
def test_staged_moves_to_the_next_horizon_after_every_stage(step: int, turns: int) -> None:
    assert horizon_turns("staged", (10, 20, 30), 100, step) == turns


def test_fixed_is_the_last_horizon() -> None:
    assert {horizon_turns("fixed", (10, 30), 5, step) for step in range(50)} == {30}


def test_linear_moves_in_single_turns_between_the_first_and_the_last() -> None:
    turns = [horizon_turns("linear", (10, 20), 10, step) for step in range(12)]
    assert turns == [10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 20]


@given(horizons, st.integers(1, 50), st.sampled_from(("fixed", "staged", "linear")))
def test_a_schedule_never_shrinks_and_stays_within_its_horizons(
    turns: tuple[int, ...], per_stage: int, kind: str
) -> None:
    seen = [horizon_turns(kind, turns, per_stage, step) for step in range(per_stage * len(turns) + 2)]  # type: ignore[arg-type]
    assert seen == sorted(seen)
    assert turns[0] <= seen[0]
    assert seen[-1] == turns[-1]
