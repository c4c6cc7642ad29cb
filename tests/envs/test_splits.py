"""Splits are drawn by hashes of ids, and by goal."""

from collections import Counter

import pytest

from horizonrl.envs.splits import hashed_split, is_validation, lowest_hashes, split_tasks

IDS = [f"task-{number}" for number in range(2_000)]


def test_a_quarter_is_for_test_and_an_eighth_of_the_rest_for_validation() -> None:
    splits = Counter(map(hashed_split, IDS))
    assert 0.22 < splits["test"] / len(IDS) < 0.28
    assert 0.10 < splits["validation"] / (len(IDS) - splits["test"]) < 0.15
    assert splits.total() - splits["test"] - splits["validation"] == splits["train"]


def test_the_test_tasks_stay_what_they_were() -> None:
    """Else results on them would not compare."""
    tested = [n for n in range(21) if hashed_split(f"seed-{n}") == "test"]
    assert tested == [4, 12, 13, 16, 18, 20]


def test_one_in_so_many_is_validation() -> None:
    assert 90 < sum(is_validation(task_id, 16) for task_id in IDS) < 160


def test_splits_are_drawn_by_the_ids_alone() -> None:
    forth, back = (
        split_tasks(dict.fromkeys(names, "all"), lowest_hashes(names, 10))
        for names in (IDS[:50], IDS[49::-1])
    )
    assert Counter(task.split for task in forth) == {"train": 35, "validation": 5, "test": 10}
    assert [task.task_id for task in forth] == IDS[:50]
    assert set(forth) == set(back)


@pytest.mark.parametrize(("tasks", "validation"), [(1, 1), (80, 10), (81, 24), (94, 24), (400, 50)])
def test_each_category_has_its_share_and_a_large_one_enough_to_choose_by(
    tasks: int, validation: int
) -> None:
    categories = dict.fromkeys(IDS[:tasks], "a") | dict.fromkeys(IDS[1_000:1_016], "b")
    counts = Counter((task.category, task.split) for task in split_tasks(categories, ()))
    assert (counts["a", "validation"], counts["b", "validation"]) == (validation, 2)


def test_tasks_of_one_goal_are_on_one_side_whatever_their_categories() -> None:
    """Three tasks have each goal, and one of them is of another category."""
    categories = {task_id: "b" if n % 3 == 2 else "a" for n, task_id in enumerate(IDS[:300])}
    goals = {task_id: n // 3 for n, task_id in enumerate(IDS[:300])}
    splits: dict[int, set[str]] = {}
    for task in split_tasks(categories, (), goals):
        splits.setdefault(goals[task.task_id], set()).add(task.split)
    assert all(len(named) == 1 for named in splits.values())
    chosen = sum(named == {"validation"} for named in splits.values())
    assert 20 <= chosen <= 30
