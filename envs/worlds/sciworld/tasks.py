"""The tasks by AgentGym's numbers, which count the variations of 23 of ScienceWorld's 30 tasks consecutively."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256

from horizonrl.envs.api import TaskSpec
from horizonrl.envs.splits import split_tasks

_TABLE = """\
boil 30 Other
melt 30 Other
freeze 30 Other
change-the-state-of-matter-of 30 Other
use-thermometer 540 Measure
measure-melting-point-known-substance 436 Measure
measure-melting-point-unknown-substance 300 Measure
power-component 20 Other
power-component-renewable-vs-nonrenewable-energy 20 Other
test-conductivity 900 Test-Cond
test-conductivity-of-unknown-substances 600 Test-Cond
find-living-thing 300 Find
find-non-living-thing 300 Find
find-plant 300 Find
find-animal 300 Find
chemistry-mix 32 Chem-Mix
chemistry-mix-paint-secondary-color 36 Chem-Mix
chemistry-mix-paint-tertiary-color 36 Chem-Mix
lifespan-longest-lived 125 Lifespan
lifespan-shortest-lived 125 Lifespan
lifespan-longest-lived-then-shortest-lived 125 Lifespan
identify-life-stages-1 14 Other
identify-life-stages-2 10 Other
"""
"""Name, variations and family, in AgentGym's order. AgentGym-RL reports five families; the others are `Other`."""
VARIATIONS = tuple(
    (name, int(count), family) for name, count, family in map(str.split, _TABLE.splitlines())
)
TEST_TASKS, TRAIN_TASKS = 200, 2_120
"""AgentGym's counts. Its repository does not say which tasks it chose, so we choose by a hash of the
number. Validation is drawn from the train tasks."""
LEFT_OUT = (80, 2039)
"""Tasks that the simulator's own solution does not solve, among the first 322 by that hash."""


@dataclass(frozen=True, slots=True)
class SciWorldTask:
    task_id: str
    name: str
    variation: int
    family: str


@cache
def index_tasks() -> Mapping[str, SciWorldTask]:
    """Return AgentGym's 4,639 tasks by their numbers, whether they are listed or not."""
    variations = (
        (name, variation, family)
        for name, count, family in VARIATIONS
        for variation in range(count)
    )
    return {str(n): SciWorldTask(str(n), *task) for n, task in enumerate(variations)}


@cache
def list_tasks() -> Sequence[TaskSpec]:
    """Return the listed tasks, in the order of the numbers."""
    numbers = (number for number in range(len(index_tasks())) if number not in LEFT_OUT)
    by_hash = sorted(numbers, key=lambda number: sha256(f"sciworld {number}".encode()).digest())
    listed = sorted(by_hash[: TEST_TASKS + TRAIN_TASKS])
    families = {str(number): index_tasks()[str(number)].family for number in listed}
    return split_tasks(families, {str(number) for number in by_hash[:TEST_TASKS]})
