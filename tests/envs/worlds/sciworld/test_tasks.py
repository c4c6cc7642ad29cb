import shutil
from collections import Counter

import pytest

from horizonrl.envs.worlds.sciworld import jvm
from horizonrl.envs.worlds.sciworld.tasks import VARIATIONS, index_tasks, list_tasks


def test_the_splits_have_agentgyms_sizes_and_every_family() -> None:
    tasks = list_tasks()
    assert Counter(task.split for task in tasks) == {"test": 200, "train": 1_837, "validation": 283}
    assert {task.category for task in tasks if task.split == "test"} == {
        family for *_, family in VARIATIONS
    }


def test_a_number_is_a_variation_in_agentgyms_order() -> None:
    """boil, melt, freeze and change-the-state have 30 variations each; use-thermometer begins at 120, with 540."""
    for task in index_tasks().values():
        if task.name == "use-thermometer":
            assert int(task.task_id) == 120 + task.variation
    assert len(index_tasks()) == sum(count for _, count, _ in VARIATIONS) == 4_639
    assert "80" not in {task.task_id for task in list_tasks()}
    # Is not listed, and can be played.
    assert (index_tasks()["80"].name, index_tasks()["80"].variation) == ("freeze", 20)


@pytest.mark.skipif(shutil.which("java") is None, reason="ScienceWorld's simulator needs Java")
def test_the_simulator_has_as_many_variations() -> None:
    machine = jvm.Jvm()
    counted = machine.wait_for(
        lambda gateway: [
            gateway.jvm.scienceworld.runtime.pythonapi.PythonInterface().getTaskMaxVariations(name)
            for name, *_ in VARIATIONS
        ]
    )
    machine.kill()
    assert counted == [count for _, count, _ in VARIATIONS]
