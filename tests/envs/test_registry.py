import subprocess
import sys
from collections.abc import Callable

import pytest

from horizonrl.common.errors import ConfigError, MissingDependency
from horizonrl.envs import registry
from horizonrl.envs.textcraft.env import TextCraft

Install = Callable[..., None]


def modules_after(code: str) -> set[str]:
    """Return the names of all modules that a new Python has imported after running the code."""
    answer = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}\nprint(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return set(answer.stdout.split())


def test_listing_the_names_imports_no_environment() -> None:
    modules = modules_after("from horizonrl.envs import registry; assert 'textcraft' in registry.names()")
    assert not {name for name in modules if name.startswith("horizonrl.envs.textcraft")}
    assert not modules & {"torch", "vllm", "deepspeed", "transformers", "numpy", "nats", "textcraft"}


def test_playing_imports_no_engine_and_not_the_package_of_the_recipes() -> None:
    play = "import asyncio\nfrom horizonrl.envs.check import check\nassert asyncio.run(check('textcraft')).passed"
    assert not modules_after(play) & {"torch", "vllm", "deepspeed", "transformers", "nats", "textcraft", "gymnasium"}


def test_an_unknown_id_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"no environment 'textcarft'; did you mean textcraft.*\? Known: .*textcraft"):
        registry.load("textcarft")


def test_a_missing_package_is_answered_with_the_cure(install: Install) -> None:
    install("needy", "import no_such_package\n")
    assert "needy" in registry.names()
    with pytest.raises(MissingDependency, match=r"'needy' needs 'no_such_package'.*pip install 'horizonrl\[envs\]'"):
        registry.load("needy")


def test_a_missing_module_of_our_own_is_a_defect_and_not_a_missing_package(install: Install) -> None:
    install("broken", "import horizonrl.envs.no_such_module\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_module") as raised:
        registry.load("broken")
    assert not isinstance(raised.value, MissingDependency)


def test_tasks_are_selected_by_split_and_category() -> None:
    assert len(registry.select("textcraft")) == 544
    assert len(registry.select("textcraft", "train")) == 444
    deep = registry.select("textcraft", "test", ["depth3", "depth4"])
    assert {task.category for task in deep} == {"depth3", "depth4"}
    assert {task.split for task in deep} == {"test"}
    assert [task for task in TextCraft.tasks() if task in deep] == list(deep)


def test_an_unknown_category_is_answered_with_the_known_ones() -> None:
    with pytest.raises(
        ConfigError, match=r"no category 'depth9'; did you mean .* Known: depth1, depth2, depth3, depth4"
    ):
        registry.select("textcraft", "train", ["depth1", "depth9"])


def test_a_selection_without_tasks_is_a_config_error(install: Install) -> None:
    install("empty", "class World:\n    @classmethod\n    def tasks(cls):\n        return ()\n")
    with pytest.raises(ConfigError, match="'empty' has no task of split 'test' in any category"):
        registry.select("empty", "test")


def test_options_reach_the_environment() -> None:
    assert isinstance(registry.make("textcraft", {"distractors": 2, "style": "compact"}), TextCraft)


def test_an_unknown_option_is_answered_with_the_known_ones() -> None:
    with pytest.raises(
        ConfigError,
        match=r"no option 'distractor'; did you mean distractors\? Known: distractors, format, max_.*, style",
    ):
        registry.make("textcraft", {"distractor": 2})


def test_an_option_of_a_wrong_value_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"option distractors: .* greater than or equal to 0 \(got -1\)"):
        registry.make("textcraft", {"distractors": -1})
