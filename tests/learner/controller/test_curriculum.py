from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horizonrl.common.errors import ConfigError
from horizonrl.common.types import Kind
from horizonrl.learner.controller.curriculum import (
    MAX_BLOCK,
    Curriculum,
    TaskSource,
    permuted,
    quotas,
)

CRAFT = TaskSource("textcraft", tuple(f"craft{n}" for n in range(7)), 3.0)
GRID = TaskSource("babyai", tuple(f"grid{n}" for n in range(4)), 1.0)


@given(st.integers(0, 5), st.lists(st.integers(0, 200), min_size=1, max_size=20))
def test_a_task_depends_on_seed_and_number_alone_not_on_what_was_asked_before(
    seed: int, numbers: list[int]
) -> None:
    asked_in_turn = Curriculum(seed, [CRAFT, GRID])
    for number in numbers:
        assert asked_in_turn.draw(Kind.TRAIN, number) == Curriculum(seed, [CRAFT, GRID]).draw(
            Kind.TRAIN, number
        )


def test_each_task_comes_once_before_any_comes_twice() -> None:
    curriculum = Curriculum(1, [CRAFT])
    for epoch in range(3):
        tasks = [curriculum.draw(Kind.TRAIN, epoch * 7 + place)[0].task_id for place in range(7)]
        assert sorted(tasks) == sorted(CRAFT.task_ids)


def test_epochs_kinds_and_seeds_have_orders_of_their_own() -> None:
    def first_epoch(seed: int, kind: Kind) -> list[str]:
        return [Curriculum(seed, [CRAFT]).draw(kind, number)[0].task_id for number in range(7)]

    orders = [first_epoch(0, Kind.TRAIN), first_epoch(1, Kind.TRAIN), first_epoch(0, Kind.DEMO)]
    assert len({tuple(order) for order in orders}) == 3


def test_each_task_of_each_environment_comes_once_an_epoch_wherever_the_blocks_end() -> None:
    curriculum = Curriculum(3, [CRAFT, GRID])
    drawn = [curriculum.draw(Kind.TRAIN, number)[0] for number in range(4_000)]
    for source in (CRAFT, GRID):
        tasks, count = (
            [task.task_id for task in drawn if task.env_id == source.env_id],
            len(source.task_ids),
        )
        epochs = [tasks[first : first + count] for first in range(0, len(tasks) - count + 1, count)]
        assert all(sorted(epoch) == sorted(source.task_ids) for epoch in epochs)


@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ([2.5], (1,)),
        ([3.0, 1.0], (3, 1)),
        ([0.7, 0.2, 0.1], (7, 2, 1)),
        ([1000.0, 500.0], (2, 1)),
        ([0.7123, 1.0], (416, 584)),
        ([5.0, 1e-9], (1000, 1)),
    ],
)
def test_every_block_holds_each_environment_by_its_weight(
    weights: list[float], shares: tuple[int, ...]
) -> None:
    assert quotas(weights) == shares
    curriculum = Curriculum(
        0, [TaskSource(f"env{n}", ("task",), weight) for n, weight in enumerate(weights)]
    )
    size = sum(shares)
    for block in (0, 1, 10**9):
        drawn = Counter(
            curriculum.draw(Kind.TRAIN, block * size + place)[0].env_id for place in range(size)
        )
        assert drawn == {f"env{n}": share for n, share in enumerate(shares)}


@given(st.lists(st.floats(1e-12, 1e12), min_size=1, max_size=8))
def test_no_environment_is_left_out_and_no_block_is_long(weights: list[float]) -> None:
    shares = quotas(weights)
    assert min(shares) >= 1
    assert sum(shares) <= MAX_BLOCK + 2 * len(weights)
    for weight, share in zip(weights, shares, strict=True):
        assert abs(share - weight / sum(weights) * sum(shares)) <= len(weights)


@given(st.integers(1, 70), st.text(max_size=3))
def test_a_permutation_takes_each_place_once(count: int, key: str) -> None:
    assert sorted(permuted(place, count, key) for place in range(count)) == list(range(count))


def test_the_draws_are_the_same_in_every_process_and_version() -> None:
    """A change of these is told in the changelog: a run that resumes goes on with other tasks."""
    curriculum = Curriculum(7, [CRAFT, GRID])
    drawn = [
        curriculum.draw(Kind.TRAIN, number)[0].task_id
        for number in (*range(6), 15_000_000, 10**9, 2**53 - 1)
    ]
    assert drawn == "craft4 grid2 craft3 craft1 grid3 craft2 craft6 craft2 craft3".split()


def test_a_source_of_other_kinds_changes_no_draw() -> None:
    demos = TaskSource("transcripts", ("a", "b"), 5.0, (Kind.DEMO,))
    alone, beside = Curriculum(0, [CRAFT, GRID]), Curriculum(0, [CRAFT, demos, GRID])
    assert [alone.draw(Kind.TRAIN, n) for n in range(100)] == [
        beside.draw(Kind.TRAIN, n) for n in range(100)
    ]
    with pytest.raises(ConfigError, match="no environment has 'eval' among its kinds"):
        Curriculum(0, [demos]).draw(Kind.EVAL, 0)
