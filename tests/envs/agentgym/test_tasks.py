"""How a server's tasks are numbered, and how a user names some of them."""

import json
from pathlib import Path

import pytest

from horizonrl.common.errors import ConfigError
from horizonrl.envs import registry


@pytest.mark.parametrize(
    ("name", "train", "test"),
    [("textcraft", 444, 100), ("babyai", 810, 90), ("searchqa", 220_928, 400), ("webarena", 762, 50), ("sheet", 0, 20)],
)
def test_the_test_split_has_the_papers_size_and_comes_last(name: str, train: int, test: int) -> None:
    tasks = registry.tasks(f"agentgym-{name}")
    assert [task.split for task in tasks] == ["train"] * train + ["test"] * test
    assert [task.task_id for task in tasks] == [str(number) for number in range(train + test)]


def test_a_user_names_tasks_by_a_range_or_a_list_of_any_of_three_kinds(tmp_path: Path) -> None:
    file = tmp_path / "test.json"
    file.write_text(json.dumps([5, "textcraft_12", {"item_id": "textcraft_7"}, 5]))
    tasks = registry.tasks("agentgym-textcraft", {"train": "3-8", "test": str(file)})
    assert [task.task_id for task in tasks if task.split == "train"] == ["3", "4", "6", "8"]
    assert [task.task_id for task in tasks if task.split == "test"] == ["5", "12", "7"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "neither a range"),
        ("{}", "no JSON list"),
        ('["textcraft"]', "'textcraft' is no task"),
        ("[-1]", "no task"),
    ],
)
def test_a_file_without_tasks_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "ids.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        registry.tasks("agentgym-maze", {"test": str(tmp_path / "ids.json")})
    with pytest.raises(ConfigError, match="neither a range"):
        registry.tasks("agentgym-maze", {"test": "gone.json"})


def test_the_version_names_the_tasks() -> None:
    url = {"url": "http://127.0.0.1:1"}
    versions = [registry.make("agentgym-maze", url | options).version for options in ({}, {}, {"train": "0-1"})]
    assert versions[0] == versions[1] != versions[2]
