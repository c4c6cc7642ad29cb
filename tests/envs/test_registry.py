import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from horizonrl.common.errors import ConfigError, MissingDependency
from horizonrl.envs import registry
from horizonrl.envs.worlds.textcraft.env import TextCraft

ROOT = Path(__file__).parents[2]
Install = Callable[..., None]
WORLDS = Path(__file__).with_name("worlds.py").read_text()


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
    modules = modules_after(
        "from horizonrl.envs import registry; assert 'textcraft' in registry.names()"
    )
    assert not {name for name in modules if name.startswith("horizonrl.envs.worlds.textcraft")}
    assert not modules & {
        "torch",
        "vllm",
        "deepspeed",
        "transformers",
        "numpy",
        "nats",
        "textcraft",
    }


def test_playing_imports_no_engine_and_not_the_package_of_the_recipes() -> None:
    play = "import asyncio\nfrom horizonrl.envs.check import check\nassert asyncio.run(check('textcraft')).passed"
    assert not modules_after(play) & {
        "torch",
        "vllm",
        "deepspeed",
        "transformers",
        "nats",
        "textcraft",
        "gymnasium",
    }


def test_an_unknown_id_is_answered_with_what_resembles_it() -> None:
    with pytest.raises(
        ConfigError,
        match=r"no environment 'textcarft'; did you mean textcraft\? `horizonrl envs list` lists all",
    ):
        registry.load("textcarft")


def test_a_package_that_a_built_in_environment_lacks_is_in_the_extra() -> None:
    with (
        pytest.raises(
            MissingDependency,
            match=r"'textcraft' needs 'gymnasium'.*pip install 'horizonrl\[envs\]'",
        ),
        registry.attributed("textcraft", "cannot be imported"),
    ):
        raise ModuleNotFoundError("No module named 'gymnasium.core'", name="gymnasium.core")


def test_the_extra_is_not_offered_for_what_a_users_package_imports(
    install: Install, tmp_path: Path
) -> None:
    install("needy", "\nimport no_such_package.part\n")
    assert "needy" in registry.names()
    with pytest.raises(ConfigError) as raised:
        registry.load("needy")
    [module] = tmp_path.glob("*.py")
    assert str(raised.value) == (
        "environment 'needy' cannot be imported: ModuleNotFoundError: No module named 'no_such_package' "
        f"({module}:2): fix the import, or `pip install no_such_package`"
    )


@pytest.mark.parametrize(
    "error", [ModuleNotFoundError("gone", name="horizonrl.envs.gone"), ValueError("no value")]
)
def test_a_defect_of_a_built_in_environment_keeps_its_traceback(error: Exception) -> None:
    with (
        pytest.raises(type(error)) as raised,
        registry.attributed("textcraft", "cannot be imported"),
    ):
        raise error
    assert raised.value is error


def test_a_module_that_a_user_misspells_is_never_one_to_install(install: Install) -> None:
    install("broken", "import horizonrl.envs.no_such_module\n")
    with pytest.raises(
        ConfigError, match=r"No module named 'horizonrl.envs.no_such_module' \(.*\.py:1\)$"
    ):
        registry.load("broken")


def test_an_id_that_two_packages_install_is_refused_with_both(install: Install) -> None:
    install("textcraft", WORLDS)
    with pytest.raises(
        ConfigError, match=r"'textcraft' is installed twice, as .*: rename or uninstall one"
    ) as raised:
        registry.load("textcraft")
    assert "horizonrl.envs.worlds.textcraft.env:TextCraft (package horizonrl)" in str(raised.value)
    assert re.search(r"(installed_\d+):World \(package \1\)", str(raised.value))
    assert registry.tasks("parity")


def test_a_failure_within_a_library_names_the_line_that_called_it(install: Install) -> None:
    install("broken", "import json\n\ndef broken():\n    json.loads('{')\n\nbroken()\n")
    with pytest.raises(ConfigError, match=r"JSONDecodeError: .* \(.*\.py:4\)$"):
        registry.load("broken")


@pytest.mark.parametrize("env_id", ["maze", "shop", "textcraft", "mcp"])
def test_what_prepares_nothing_ahead_of_need_has_nothing_left_to_prepare(env_id: str) -> None:
    assert registry.preparation(env_id)() is False


def test_what_is_no_task_is_not_listed_as_one(install: Install) -> None:
    install("numbers", f"{WORLDS}\nWorld.tasks = lambda: range(3)\n")
    with pytest.raises(
        ConfigError,
        match=r"'numbers' lists 0: a task is a TaskSpec whose split is one of 'train', 'val",
    ):
        registry.select("numbers")


def test_tasks_are_selected_by_split_and_category() -> None:
    assert len(registry.select("textcraft")) == 544
    assert len(registry.select("textcraft", "train")) == 363
    deep = registry.select("textcraft", "test", ["depth3", "depth4"])
    assert {task.category for task in deep} == {"depth3", "depth4"}
    assert {task.split for task in deep} == {"test"}
    assert [task for task in TextCraft.tasks() if task in deep] == list(deep)


def test_an_unknown_category_is_answered_with_the_known_ones() -> None:
    with pytest.raises(
        ConfigError,
        match=r"no category 'depth9'; did you mean .* Known: depth1, depth2, depth3, depth4",
    ):
        registry.select("textcraft", "train", ["depth1", "depth9"])


def test_a_selection_without_tasks_is_a_config_error(install: Install) -> None:
    install("empty", f"{WORLDS}\nWorld.tasks = tuple\n")
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
    with pytest.raises(
        ConfigError, match=r"option distractors: .* greater than or equal to 0 \(got -1\)"
    ):
        registry.make("textcraft", {"distractors": -1})


def test_the_pages_count_the_environments_that_come_with_the_package() -> None:
    entries = entry_points(group=registry.GROUP)
    worlds = {entry.name for entry in entries if ".envs.worlds." in entry.value} - {"delayed"}
    page = (ROOT / "docs/environments/scenarios.md").read_text()
    cells = re.findall(r"^\|([^|]+)\|", page.partition("Each has")[0], re.MULTILINE)
    assert {name for cell in cells for name in re.findall(r"`([\w-]+)`", cell)} == worlds
    counts = re.findall(r"(\d+) environments", (ROOT / "README.md").read_text())
    assert counts == [str(len(worlds))]
