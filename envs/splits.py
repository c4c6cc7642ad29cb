"""The three splits of a list of tasks: `train`, `validation` to choose by, `test` to play for a result.

Tasks are drawn by the sha256 of their ids: without a pattern of their order, and without a random generator that a new
Python may change.
"""

from collections import Counter, defaultdict
from collections.abc import Container, Hashable, Iterable, Mapping
from hashlib import sha256
from math import ceil

from horizonrl.envs.api import Split, TaskSpec

TEST_OF_8 = 2
"""Of eight tasks that `hashed_split` divides, two are test tasks on average."""
ONE_IN = 8
"""Of so many tasks that are not test tasks, one is for validation."""
MANY, LEAST_OF_MANY = 80, 24
"""Of a category with more tasks than `MANY`, the fewest for validation: with fewer, chance decides what is chosen."""


def hashed_split(task_id: str) -> Split:
    """Return a task's split, which depends on its id alone: longer lists of tasks move none of them."""
    if _sha256(task_id)[0] % 8 < TEST_OF_8:
        return "test"
    return "validation" if is_validation(task_id) else "train"


def is_validation(task_id: str, one_in: int = ONE_IN) -> bool:
    """Return whether a task that is not a test task is for validation, as one of `one_in` is on average."""
    # Another byte than the one that draws the test tasks.
    return _sha256(task_id)[1] % one_in == 0


def lowest_hashes(task_ids: Iterable[str], count: int) -> frozenset[str]:
    """Return the `count` ids with the lowest sha256."""
    return frozenset(sorted(task_ids, key=_sha256)[:count])


def split_tasks(
    category_of: Mapping[str, str],
    test: Container[str],
    goal_of: Mapping[str, Hashable] | None = None,
) -> tuple[TaskSpec, ...]:
    """Return the tasks in the given order, each with its split; `test` holds the test tasks.

    Of the others, those with the lowest sha256 in each category are validation, and with them all that have the same
    goal. Without `goal_of`, no two tasks have the same.
    """
    others = {task_id: name for task_id, name in category_of.items() if task_id not in test}
    goals = goal_of or {task_id: task_id for task_id in others}
    by_goal: dict[Hashable, list[str]] = defaultdict(list)
    for task_id in others:
        by_goal[goals[task_id]].append(task_id)
    sizes = Counter(others.values())
    missing = Counter({category: _validation_size(sizes[category]) for category in sizes})
    validation: set[str] = set()
    for task_id in sorted(others, key=_sha256):
        if missing[others[task_id]] > 0 and task_id not in validation:
            alike = by_goal[goals[task_id]]
            validation.update(alike)
            missing.subtract(others[member] for member in alike)

    def split(task_id: str) -> Split:
        if task_id in test:
            return "test"
        return "validation" if task_id in validation else "train"

    return tuple(
        TaskSpec(task_id, split(task_id), category) for task_id, category in category_of.items()
    )


def _validation_size(tasks: int) -> int:
    share = ceil(tasks / ONE_IN)
    return max(share, LEAST_OF_MANY) if tasks > MANY else share


def _sha256(text: str) -> bytes:
    return sha256(text.encode()).digest()
