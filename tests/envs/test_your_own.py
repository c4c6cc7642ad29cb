"""The template of docs/environments/your-own.md, from the page to a checked environment."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from horizonrl.envs.api import Observation, Step, TaskSpec

PAGE = Path(__file__).parents[2] / "docs/environments/your-own.md"
FILE = re.compile(r"^`(\S+)`:\n\n```\w+\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the page's package and install it with pip, without an index, into a folder of its own."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("target")
    for name, text in FILE.findall(PAGE.read_text()):
        (source / name).write_text(text)
    assert sorted(file.name for file in source.iterdir()) == [
        "horizonrl_guess.py",
        "pyproject.toml",
        "recipe.toml",
    ]
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--no-build-isolation",
    ]
    subprocess.run(
        [*pip, "--target", str(target), str(source)], check=True, timeout=240, capture_output=True
    )
    shutil.copy(source / "recipe.toml", target)
    return target


def horizonrl(installed: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "horizonrl.ops.cli.main", *words]
    environ = os.environ | {"PYTHONPATH": str(installed), "COLUMNS": "160"}
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=240, env=environ
    )


@pytest.mark.process
@pytest.mark.parametrize("action_format", ["react", "code", "native"])
def test_the_template_keeps_the_contract_in_words_in_calls_and_with_tools(
    installed: Path, action_format: str
) -> None:
    checked = horizonrl(installed, "envs", "check", "guess", "--options.format", action_format)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "NO" not in checked.stdout
    assert ("1 tools" in checked.stdout) == (action_format == "native")


def test_the_page_names_every_field_of_the_types() -> None:
    page = PAGE.read_text()
    for record in (TaskSpec, Observation, Step):
        for field in fields(record):
            assert re.search(rf"^\| .*`{field.name}`.* \|", page, re.MULTILINE), (
                f"{record.__name__}.{field.name}"
            )


@pytest.mark.process
def test_a_template_that_pays_twice_is_found_out(installed: Path, tmp_path: Path) -> None:
    module = (installed / "horizonrl_guess.py").read_text()
    broken = module.replace(
        '            self._secret = None\n            return Step("Right',
        '            return Step("Right',
    )
    assert broken != module
    (tmp_path / "horizonrl_guess.py").write_text(broken)
    checked = horizonrl(Path(f"{tmp_path}:{installed}"), "envs", "check", "guess")
    assert checked.returncode == 1
    assert (
        "a step after the end raised no EnvironmentFailure, but was answered: 'There is no"
        in checked.stdout
    )
    assert re.search(
        rf"at: {tmp_path}/horizonrl_guess\.py:\d+, Guess\.step\n +after: step\('look'\)",
        checked.stdout,
    )
