"""A user's package in the commands that list, check, measure and train: a broken one, and one without an expert."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from horizonrl.common.config.schema import RunConfig
from horizonrl.common.errors import ConfigError
from horizonrl.learner.controller.curriculum import sources_of
from horizonrl.ops.cli.main import main

Install = Callable[..., None]
Captured = pytest.CaptureFixture[str]

README = (Path(__file__).parents[2] / "README.md").read_text()
GUESS = "".join(re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL))
"""The class of the README, which has no expert."""


@pytest.fixture(autouse=True)
def _terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # servers are programs of their own


def broken(right: str, wrong: str) -> str:
    assert GUESS.count(right) == 1
    return GUESS.replace(right, wrong)


@pytest.mark.parametrize(
    ("source", "says", "line"),
    [
        (broken("        self.secret = task_id", "        self.secret = ("), "SyntaxError", 18),
        (broken("TASKS = {", "raise SystemExit(1)\n{"), "cannot be imported: SystemExit: 1", 5),
        (
            broken('version, secret = "guess", "1"', 'secret = "guess"'),
            "Guess has no text `version`",
            8,
        ),
        (broken("async def reset", "async def restart"), "Guess has no method reset", 8),
        (
            broken("list(TASKS.values())", "TASKS.values()"),
            "Guess.tasks returned a dict_values, not a list",
            11,
        ),
        (broken("list(TASKS.values())", "TASKS[1]"), "cannot list its tasks: KeyError: 1", 13),
        (
            broken('"validation"', '"dev"'),
            "lists TaskSpec.* whose split is one of 'train', 'validation', 'test'",
            11,
        ),
    ],
)
def test_a_broken_package_is_one_message_with_its_line(
    source: str, says: str, line: int, install: Install, capsys: Captured, tmp_path: Path
) -> None:
    install("guess", source, "Guess")
    [file] = tmp_path.glob("*.py")
    expect_message(rf"{says}.* \({re.escape(str(file))}:{line}\)", capsys)


def test_a_class_that_is_not_there_is_named_with_its_entry_point(
    install: Install, capsys: Captured
) -> None:
    install("guess", GUESS, "Gues")
    expect_message(
        r"has no attribute 'Gues' \(.*\.py, entry point guess = installed_\d+:Gues\)", capsys
    )


def expect_message(message: str, capsys: Captured) -> None:
    """Expect it of every command, and that other environments are listed all the same."""
    assert main(["envs", "list", "guess", "parity"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"│ parity +│ 1 +│ 32 +│ 16 +│ 16 +│ all 64", shown)
    assert re.search(rf"^guess: .*{message}$", shown, re.MULTILINE), shown
    assert main(["envs", "check", "guess"]) == 2
    assert re.fullmatch(rf"error: environment 'guess' .*{message}\n", capsys.readouterr().err)
    assert main(["bench", "envs:guess"]) == 2
    measured = capsys.readouterr()
    assert re.search(rf"^error: environment 'guess' .*{message}$", measured.err, re.MULTILINE), (
        measured.err
    )
    assert measured.out == ""
    with pytest.raises(ConfigError, match=message):  # what `train` asks before it starts anything
        sources_of(RunConfig.load([], ["--envs", '[{"id": "guess"}]']).envs)


def test_a_name_is_whole_on_a_narrow_terminal_and_a_skipped_check_is_called_so(
    install: Install, capsys: Captured
) -> None:
    name = "guess-a-number-of-two-digits"
    install(name, GUESS.replace('"guess"', f'"{name}"'), "Guess")
    assert main(["envs", "list", name, "agentgym-textcraft"]) == 0
    shown = capsys.readouterr().out
    assert f"│ {name} │" in shown and "│ agentgym-textcraft " in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert main(["envs", "check", name]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"│ the expert solves the tasks +│ skipped +│ without an expert", shown), shown
    assert re.search(r"│ an episode ends once +│ yes +│", shown), shown


def test_a_step_that_exits_ends_no_command_and_is_described_once(
    install: Install, capsys: Captured
) -> None:
    source = broken(
        "        if text.strip() ==", "        raise SystemExit(3)\n        if text.strip() =="
    )
    install("guess", source, "Guess")
    assert main(["envs", "check", "guess"]) == 1
    shown = capsys.readouterr().out
    assert shown.count("SystemExit(3) would end the actor") == 1
    assert re.search(
        r"^NO: no text raises\n(NO: .*\n)*    RuntimeError.*\n    at: .*:24, step\n",
        shown,
        re.MULTILINE,
    )
    assert main(["bench", "envs:guess"]) == 2
    assert re.search(
        r"^error: .* SystemExit: 3 \(.*\.py:24\)$", capsys.readouterr().err, re.MULTILINE
    )


def test_a_constructor_that_raises_is_named_with_its_line(
    install: Install, capsys: Captured
) -> None:
    source = broken(
        "    async def close", "    def __init__(self):\n        1 / 0\n\n    async def close"
    )
    install("guess", source, "Guess")
    assert main(["envs", "check", "guess"]) == 2
    assert re.search(
        r"cannot be created and closed: ZeroDivisionError: .* \(.*\.py:31\)\n",
        capsys.readouterr().err,
    )


def test_a_remedy_is_whole_in_80_columns(install: Install, capsys: Captured) -> None:
    remedy = "pip install 'horizonrl[an-extra-with-a-long-name]'"
    source = broken("TASKS = {", f"raise MissingDependency({remedy!r})\nTASKS = {{")
    install("guess", f"from horizonrl.common.errors import MissingDependency\n{source}")
    long = broken('"guess", "1"', '"other", "1 a-package-with-a-long-name==0.1.23.post4"')
    install("other", long, "Guess")
    assert main(["envs", "list", "guess", "other"]) == 0
    shown = capsys.readouterr().out
    assert f"guess: {remedy}\n" in shown
    assert "…" not in shown


@pytest.mark.process
def test_an_environment_without_an_expert_is_measured_with_made_up_texts(
    install: Install, capsys: Captured, tmp_path: Path
) -> None:
    install("guess", GUESS, "Guess")
    out = tmp_path / "envs.json"
    assert main(["bench", "envs:guess", "--small", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    rates = [row for row in rows if row["unit"] == "steps/s"]
    assert [row["what"].rpartition(", ")[2] for row in rates] == ["1 clients", "32 clients"] * 3
    assert all(row["ours"] > 0 for row in rates)
    assert "guess served" in capsys.readouterr().out
