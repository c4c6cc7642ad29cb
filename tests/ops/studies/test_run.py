"""Studies: which runs are run again, and what the report makes of their journals.

In place of `train` stands a child process of a few lines that reads the same recipe and writes the same journal.
"""

import json
import re
import signal
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horizonrl.common.errors import ConfigError
from horizonrl.ops.cli.main import main
from horizonrl.ops.studies.outcome import collapses
from horizonrl.ops.studies.run import StudyRequest, run
from horizonrl.ops.studies.study import RECIPES, plan
from tests.ops.studies.studies import BASE, STUDY, study_of

CHILD = """
import json, os, signal, sys, time, tomllib
from pathlib import Path

config = tomllib.loads(Path(sys.argv[1]).read_text())
place = Path(config["run"]["root"]) / config["run"]["name"]
with (place.parent / "started").open("a") as started:
    started.write(config["run"]["name"] + "\\n")
if config["rl"]["lr"] > 1:
    print("the loss exploded")
    sys.exit(3)
(place / "checkpoints").mkdir(exist_ok=True)
(place / "episodes").mkdir(exist_ok=True)
journal = place / "metrics.jsonl"
done = len(journal.read_text().splitlines()) if journal.exists() else 0
with journal.open("a") as lines:
    for step in range(done, config["rl"]["steps"]):
        rate = min(1.0, 1e4 * config["rl"]["lr"] * (step + 1) / 10)
        line = dict(phase="rl", step=step + 1, episodes=16, error_share=0.0, success_rate=rate, truncated_share=0.25)
        line |= dict(ess=0.5, staleness_mean=1.0, staleness_max=2, environment_steps=32, generated_tokens=100)
        line |= dict(processed_tokens=150, step_s=2.0, wait_s=1.0)
        lines.write(json.dumps(line) + "\\n")
        lines.flush()
        if step == 3 and (number := os.environ.get("INTERRUPT")):
            signal.signal(signal.SIGTERM, lambda *_: (place / "in-order").touch() or sys.exit(130))
            os.kill(os.getppid(), int(number))
            time.sleep(60)
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "base.toml").write_text(BASE)
    (tmp_path / "study.toml").write_text(STUDY)
    (tmp_path / "child.py").write_text(CHILD)
    return tmp_path


def carry_out(place: Path, **options: Any) -> int:
    def command(recipe: Path) -> Sequence[str]:
        return [sys.executable, str(place / "child.py"), str(recipe)]

    return run(StudyRequest(place / "study.toml", place / "out", **options), command)


def started(place: Path) -> list[str]:
    path = place / "out" / "started"
    return path.read_text().split() if path.exists() else []


def test_a_variants_own_recipe_takes_the_place_of_the_studys(place: Path) -> None:
    study = study_of(place, STUDY.replace("rl.lr = 1e-4", 'rl.lr = 1e-4\nrecipe = "laptop"'))
    laptop = tomllib.loads((RECIPES / "laptop.toml").read_text())["rl"]["steps"]
    assert [each.config.rl.steps for each in plan(study, place / "out")] == [10, laptop] * 2
    assert carry_out(place) == 0
    results = json.loads((place / "out" / "results.json").read_text())
    assert (results["recipe"], "; high: " in results["evaluation"]) == (
        "base.toml, laptop.toml",
        True,
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            STUDY.replace("rl.lr = 1e-4", "rl.learning_rate = 1e-4"),
            "variant high: rl.learning_rate: no such key",
        ),
        (
            STUDY.replace("rl.lr = 1e-4\nenvs", "rl.lr = 1e-5\n#"),
            "variants low and high resolve to the same config",
        ),
        (
            STUDY.replace("rl.lr = 1e-4", "rl.steps = 0\nimitation.steps = 3"),
            "variant high: rl.steps is 0",
        ),
    ],
)
def test_every_config_is_checked_before_the_first_run(place: Path, text: str, message: str) -> None:
    (place / "study.toml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        carry_out(place)
    assert not (place / "out").exists()


@pytest.mark.parametrize(
    ("selection", "message"),
    [({"seeds": [2]}, "names \\[2\\]"), ({"only": ["mid"]}, "mid matches no variant")],
)
def test_asking_for_what_the_study_lacks_is_refused(
    place: Path, selection: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        carry_out(place, **selection)


def test_a_study_is_run_once_and_reported(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert carry_out(place) == 0
    assert started(place) == ["low-seed0", "high-seed0", "low-seed1", "high-seed1"]
    shown = capsys.readouterr().out.splitlines()
    assert re.match(r"\[1/4\] low-seed0: finished in 0\.\d min; 3 to go, about \d min", shown[0])
    assert shown[3].endswith("; 0 to go")

    out = place / "out"
    assert sorted(path.name for path in (out / "low-seed0").iterdir()) == [
        "ending.json",
        "episodes",
        "logs",
        "metrics.jsonl",
        "recipe.toml",
    ]
    results = json.loads((out / "results.json").read_text())
    assert results["command"].endswith("study.toml --directory DIR`")  # no path of this machine
    low, high = results["variants"]
    assert (low["final"]["mean"], high["final"]["mean"]) == (
        pytest.approx(0.095),
        pytest.approx(0.95),
    )
    assert results["runs"][0]["environment_steps"] == 320
    assert "|`high`−`low` (primary)|updates|" in (out / "report.md").read_text()
    for axis in ("steps", "environment-steps", "generated-tokens", "processed-tokens", "seconds"):
        assert (out / f"success-{axis}.svg").read_text().startswith("<?xml")

    assert carry_out(place) == 0
    assert len(started(place)) == 4
    assert "had finished" in capsys.readouterr().out


def test_a_run_of_another_machine_counts_once_its_directory_is_here(place: Path) -> None:
    assert carry_out(place, seeds=[0]) == 0
    ending = place / "out" / "low-seed0" / "ending.json"
    ending.write_text(json.dumps(json.loads(ending.read_text()) | {"machine": "elsewhere"}))
    (place / "out").rename(place / "copied")
    assert carry_out(place, seeds=[1]) == 0
    for name in ("low-seed0", "high-seed0"):
        (place / "copied" / name).rename(place / "out" / name)
    assert carry_out(place) == 0
    assert started(place) == ["low-seed1", "high-seed1"]
    results = json.loads((place / "out" / "results.json").read_text())
    assert results["machine"].endswith("; elsewhere")
    assert [(run["variant"], run["seed"]) for run in results["runs"]] == [
        ("low", 0),
        ("high", 0),
        ("low", 1),
        ("high", 1),
    ]


PHASES = (
    STUDY
    + """
[phases.small]
seeds = [7]
only = ["high"]
overrides = { "rl.steps" = 2 }
"""
)


def test_a_phase_has_seeds_variants_and_overrides_of_its_own(place: Path) -> None:
    (place / "study.toml").write_text(PHASES)
    assert carry_out(place, phase="small") == 0
    assert started(place) == ["high-seed7"]
    results = json.loads((place / "out" / "results.json").read_text())
    assert results["runs"][0]["environment_steps"] == 64 and "--phase small" in results["command"]
    with pytest.raises(ConfigError, match="has no phase 'screen'; its phases: small"):
        carry_out(place, phase="screen")


def test_a_run_without_anything_left_to_learn_is_a_result_and_a_collapse(place: Path) -> None:
    child = (place / "child.py").read_text()
    (place / "child.py").write_text(
        child + '\nprint("error: hardly any group can be trained on (...)")\nsys.exit(2)\n'
    )
    assert carry_out(place, seeds=[0], only=["low"]) == 0
    assert json.loads((place / "out" / "results.json").read_text())["variants"][0]["collapsed"] == 1
    assert carry_out(place, seeds=[0], only=["low"]) == 0
    assert started(place) == ["low-seed0"]


def test_a_collapse_is_a_fall_from_the_best_that_lasts() -> None:
    assert collapses(np.array([0.3, 0.5, 0.34, 0.35, 0.5]))
    assert not collapses(np.array([0.3, 0.5, 0.34, 0.36, 0.34, 0.5]))
    assert not collapses(np.array([0.5, 0.0])) and not collapses(np.array([0.4]))


def test_a_part_of_a_study_can_be_run_and_the_rest_later(place: Path) -> None:
    assert carry_out(place, seeds=[1], only=["high"]) == 0
    assert started(place) == ["high-seed1"]
    assert carry_out(place) == 0
    assert sorted(started(place)) == ["high-seed0", "high-seed1", "low-seed0", "low-seed1"]


def test_a_failed_run_is_recorded_and_the_study_goes_on(place: Path) -> None:
    (place / "study.toml").write_text(STUDY.replace('"rl.lr" = 1e-5', '"rl.lr" = 2.0'))
    assert carry_out(place) == 1
    assert len(started(place)) == 4
    report = (place / "out" / "report.md").read_text()
    assert "2 of 4 runs" in report
    assert "the loss exploded" in report
    assert carry_out(place) == 1
    assert started(place)[4:] == ["low-seed0", "low-seed1"]
    assert carry_out(place, report_only=True) == 1
    assert len(started(place)) == 6


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Make SIGINT interrupt: a shell that starts the tests in the background has them ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_study_ends_its_child_in_order_and_goes_on_later(
    place: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setenv("INTERRUPT", str(int(number)))
    assert carry_out(place) == 130
    assert (place / "out" / "low-seed0" / "in-order").exists()
    assert (place / "out" / "low-seed0" / "checkpoints").exists()
    assert started(place) == ["low-seed0"]
    assert carry_out(place, report_only=True) == 1, "nothing to report yet"

    monkeypatch.delenv("INTERRUPT")
    assert carry_out(place) == 0
    assert started(place)[:3] == ["low-seed0", "low-seed0", "high-seed0"]
    assert len((place / "out" / "low-seed0" / "metrics.jsonl").read_text().splitlines()) == 10


def test_a_directory_of_another_study_is_refused(place: Path) -> None:
    assert carry_out(place) == 0
    (place / "study.toml").write_text(STUDY.replace("1e-5", "2e-5"))
    with pytest.raises(
        ConfigError, match=r"low-seed0 was begun with another rl.lr \(1e-05, now 2e-05\)"
    ):
        carry_out(place)


def test_the_command_line_reaches_the_study(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["study", "learning", str(place / "study.toml"), "--directory", str(place / "out")]
    assert main([*command, "--report-only", "--seeds", "0,1", "--only", "low"]) == 1
    assert "no run has finished" in capsys.readouterr().out
    assert main([*command, "--seeds", "7"]) == 2
    assert main([*command, "--rl.lr", "1e-3", "--envs.0.id", "x"]) == 2


PHASED = (
    STUDY
    + """
[phases.screen]
seeds = [7]
only = ["low"]
"""
)


def test_the_selection_narrows_a_phase(place: Path) -> None:
    (place / "study.toml").write_text(PHASED)
    assert carry_out(place, phase="screen") == 0
    assert (place / "out" / "started").read_text().split() == ["low-seed7"]
    with pytest.raises(ConfigError, match="--only high matches no variant; study rates has low"):
        carry_out(place, phase="screen", only=["high"])
