"""Write the frozen task list: `python -m horizonrl.envs.worlds.textcraft.build FILE`.

Run it once for each version of the recipes. A test checks that building again gives the committed file.
"""

import json
import sys
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

from horizonrl.envs.worlds.textcraft.recipes import PACKAGE, RecipeBook, find_recipes, read_book
from horizonrl.envs.worlds.textcraft.tasks import make_task_id

TEST_TASKS = {1: 31, 2: 41, 3: 25, 4: 3}
"""Test tasks by depth: the mix that AgentGym-RL's published percentages imply (35.5 % of depth 1 is 11 of 31, ...), so
that a success rate over all of them compares."""


def freeze(book: RecipeBook) -> str:
    """Return the task list of a book as JSON, one task per line."""
    test = _test_tasks(book.depths)
    lines = [
        json.dumps(
            {
                "task_id": make_task_id(item),
                "depth": depth,
                "split": "test" if item in test else "train",
            }
        )
        for item, depth in sorted(book.depths.items())
    ]
    head = f'"package": {json.dumps(PACKAGE)},\n"recipes_sha256": {json.dumps(book.digest)},\n'
    return "{\n" + head + '"tasks": [\n' + ",\n".join(lines) + "\n]\n}\n"


def _test_tasks(depths: Mapping[str, int]) -> frozenset[str]:
    """Return, for each depth, the items with the lowest hashes. A hash does not depend on a random generator."""
    drawn = sorted(depths, key=lambda item: sha256(make_task_id(item).encode()).digest())
    return frozenset(
        item
        for depth, count in TEST_TASKS.items()
        for item in [i for i in drawn if depths[i] == depth][:count]
    )


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(freeze(read_book(find_recipes())), encoding="utf-8")
