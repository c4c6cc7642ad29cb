from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horizonrl.common.errors import ConfigError
from horizonrl.common.types import Kind
from horizonrl.learner.curriculum import Curriculum, Source

CRAFT = Source("textcraft", tuple(f"craft{n}" for n in range(7)), 3.0)
GRID = Source("babyai", tuple(f"grid{n}" for n in range(4)), 1.0)


@given(st.integers(0, 5), st.lists(st.integers(0, 200), min_size=1, max_size=20))
def test_a_task_depends_on_seed_and_number_alone_not_on_what_was_asked_before(seed: int, numbers: list[int]) -> None:
    asked_in_turn = Curriculum(seed, [CRAFT, GRID])
    for number in numbers:
        assert asked_in_turn.task(Kind.TRAIN, number) == Curriculum(seed, [CRAFT, GRID]).task(Kind.TRAIN, number)


def test_each_task_comes_once_before_any_comes_twice() -> None:
    curriculum = Curriculum(1, [CRAFT])
    for epoch in range(3):
        tasks = [curriculum.task(Kind.TRAIN, epoch * 7 + place).task_id for place in range(7)]
        assert sorted(tasks) == sorted(CRAFT.task_ids)


def test_epochs_kinds_and_seeds_have_orders_of_their_own() -> None:
    def first_epoch(seed: int, kind: Kind) -> list[str]:
        return [Curriculum(seed, [CRAFT]).task(kind, number).task_id for number in range(7)]

    orders = [first_epoch(0, Kind.TRAIN), first_epoch(1, Kind.TRAIN), first_epoch(0, Kind.DEMO)]
    assert len({tuple(order) for order in orders}) == 3


def test_environments_are_drawn_by_weight() -> None:
    curriculum = Curriculum(0, [CRAFT, GRID])
    drawn = Counter(curriculum.task(Kind.TRAIN, number).env_id for number in range(2000))
    assert 0.70 < drawn["textcraft"] / 2000 < 0.80


def test_a_source_of_other_kinds_changes_no_draw() -> None:
    demos = Source("transcripts", ("a", "b"), 5.0, (Kind.DEMO,))
    alone, beside = Curriculum(0, [CRAFT, GRID]), Curriculum(0, [CRAFT, demos, GRID])
    assert [alone.task(Kind.TRAIN, n) for n in range(100)] == [beside.task(Kind.TRAIN, n) for n in range(100)]
    with pytest.raises(ConfigError, match="no environment has 'eval' among its kinds"):
        Curriculum(0, [demos]).task(Kind.EVAL, 0)
