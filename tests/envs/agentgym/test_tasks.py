"""How a server's tasks are numbered, and how a user names some of them."""

import json
from pathlib import Path

import pytest

from horizonrl.common.errors import ConfigError
from horizonrl.envs import registry


@pytest.mark.parametrize(
    ("name", "train", "test"),
    [
        ("textcraft", 444, 100),
        ("babyai", 810, 90),
        ("searchqa", 220_928, 400),
        ("webarena", 762, 50),
        ("sheet", 0, 20),
    ],
)
def test_the_test_split_has_the_papers_size_and_comes_last(
    name: str, train: int, test: int
) -> None:
    tasks = registry.tasks(f"agentgym-{name}")
    assert [task.split for task in tasks[-test:]] == ["test"] * test
    assert [task.task_id for task in tasks[-test:]] == [str(train + n) for n in range(test)]
    assert {task.task_id for task in tasks} == {str(number) for number in range(train + test)}
    validation = sum(task.split == "validation" for task in tasks)
    assert train / 20 <= validation <= train / 12


def test_a_user_names_tasks_by_a_range_or_a_list_of_any_of_three_kinds(tmp_path: Path) -> None:
    file = tmp_path / "test.json"
    file.write_text(json.dumps([5, "textcraft_12", {"item_id": "textcraft_7"}, 5]))
    lists = {"train": "3-8", "validation": "6-7", "test": str(file)}
    tasks = registry.tasks("agentgym-textcraft", lists)
    assert [task.task_id for task in tasks if task.split == "train"] == ["3", "4", "8"]
    assert [task.task_id for task in tasks if task.split == "validation"] == ["6"]
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


TRIAL = "look_at_obj_in_light-AlarmClock-None-DeskLamp-301_trial_T20190907_174127_043461"


def mapped(folder: Path) -> None:
    """Write two mappings as AgentGym's folder has them."""
    for name, number, trial in (("train", 0, "174127_043461"), ("test", 2420, "143209_571893")):
        entry = {"item_id": number, "task_type": "look", "task_id": f"trial_T20190907_{trial}"}
        (folder / f"mappings_{name}.json").write_text(json.dumps([entry]))


def test_a_list_of_alfreds_trials_is_numbered_by_agentgyms_mappings(tmp_path: Path) -> None:
    mapped(tmp_path)
    file = tmp_path / "alfworld_test.json"
    file.write_text(
        json.dumps([{"item_id": f"alfworld_{TRIAL}"}, {"item_id": "alfworld_7"}, TRIAL])
    )
    options = {"test": str(file), "train": "5-5", "mappings": str(tmp_path)}
    assert [task.task_id for task in registry.tasks("agentgym-alfworld", options)] == [
        "5",
        "0",
        "7",
    ]
    options["mappings"] = str(tmp_path / "mappings_test.json")
    with pytest.raises(ConfigError, match="trial_T20190907_174127_043461 is none of the 1 trials"):
        registry.tasks("agentgym-alfworld", options)
    with pytest.raises(
        ConfigError, match=r"names ALFRED's trials, .*: set options\.mappings to AgentGym's folder"
    ):
        registry.tasks("agentgym-alfworld", {"test": str(file)})


@pytest.mark.parametrize("entry", ["sciworld_12", {"item_id": "textcraft_extra_3"}, TRIAL])
def test_another_environments_list_is_refused(tmp_path: Path, entry: object) -> None:
    (tmp_path / "ids.json").write_text(json.dumps([entry]))
    with pytest.raises(ConfigError, match=r"is a task of .*, and this environment is textcraft"):
        registry.tasks("agentgym-textcraft", {"test": str(tmp_path / "ids.json")})


def test_lmrlgyms_lists_are_those_of_maze_and_wordle(tmp_path: Path) -> None:
    (tmp_path / "ids.json").write_text('["lmrlgym_maze_3"]')
    tasks = registry.tasks("agentgym-maze", {"train": "0-1", "test": str(tmp_path / "ids.json")})
    assert [task.task_id for task in tasks] == ["0", "1", "3"]


def test_the_mazes_start_that_is_its_goal_is_no_task() -> None:
    assert [task.task_id for task in registry.tasks("agentgym-maze")][-1] == "24"


def test_the_version_names_the_tasks() -> None:
    url = {"url": "http://127.0.0.1:1"}
    versions = [
        registry.make("agentgym-maze", url | options).version
        for options in ({}, {}, {"train": "0-1"})
    ]
    assert versions[0] == versions[1] != versions[2]
