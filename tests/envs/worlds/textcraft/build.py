"""Write the frozen task list: `python -m tests.envs.worlds.textcraft.build FILE`.

Run it once for each version of the recipes. A test checks that building again gives the committed file.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from horizonrl.envs.splits import lowest_hashes, split_tasks
from horizonrl.envs.worlds.textcraft.recipes import PACKAGE, RecipeBook, find_recipes, read_book
from horizonrl.envs.worlds.textcraft.tasks import make_task_id

TEST_TASKS = {1: 31, 2: 41, 3: 25, 4: 3}
"""Test tasks by depth: the mix that AgentGym-RL's published percentages imply (35.5 % of depth 1 is 11 of 31, ...), so
that a success rate over all of them compares."""


def freeze(book: RecipeBook) -> str:
    """Return the task list of a book as JSON, one task per line."""
    depths = {make_task_id(item): depth for item, depth in sorted(book.depths.items())}
    categories = {task_id: f"depth{depth}" for task_id, depth in depths.items()}
    lines = [
        json.dumps({"task_id": task.task_id, "depth": depths[task.task_id], "split": task.split})
        for task in split_tasks(categories, _test_tasks(depths))
    ]
    head = f'"package": {json.dumps(PACKAGE)},\n"recipes_sha256": {json.dumps(book.digest)},\n'
    return "{\n" + head + '"tasks": [\n' + ",\n".join(lines) + "\n]\n}\n"


def _test_tasks(depths: Mapping[str, int]) -> frozenset[str]:
    """Return the test tasks of all depths."""
    of_depth = {
        depth: [task_id for task_id in depths if depths[task_id] == depth] for depth in TEST_TASKS
    }
    return frozenset().union(
        *(lowest_hashes(of_depth[depth], count) for depth, count in TEST_TASKS.items())
    )


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(freeze(read_book(find_recipes())), encoding="utf-8")
