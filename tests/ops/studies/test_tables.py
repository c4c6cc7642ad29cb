"""The tables that a study has its runs play: what is played, when, and what a report makes of it."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from horizonrl.common.errors import ConfigError
from horizonrl.common.types import StopReason
from horizonrl.ops.evaluation.journal import Line, TurnRecord
from horizonrl.ops.studies import run as runs
from horizonrl.ops.studies.study import TableFile, plan
from horizonrl.ops.studies.tables import table_commands
from tests.ops.studies.studies import BASE, STUDY, study_of
from tests.ops.studies.test_run import CHILD
from tests.ops.studies.test_run import carry_out as carry_out_study

TABLE = STUDY.replace(
    '"rl.groups_per_step" = 2',
    '"rl.groups_per_step" = 2\nimitation = { steps = 3 }\nlearner = { checkpoint_every = 100 }',
) + ("\n[table]\ntasks = 2\nsamples = 4\n")
ROW: dict[str, Any] = {
    "scenario": "Games",
    "task": "Depth 1",
    "env": "textcraft",
    "episodes": 8,
    "low": 0.1,
    "high": 0.6,
}
EVALUATION = """
import json, os, sys
from pathlib import Path

out = Path(sys.argv[sys.argv.index("--out") + 1])
with (out.parents[2] / "played").open("a") as played:
    played.write(f"{out.parent.parent.name} {out.name} {Path(sys.argv[1]).name}\\n")
if os.environ.get("BREAK") == out.name:
    print("no weights here")
    sys.exit(2)
out.mkdir(parents=True, exist_ok=True)
rate = 0.25 if out.name == "before" else 0.5
row = json.loads(os.environ["ROW"]) | {"success_rate": rate, "turns_mean": 3.0}
block = {"turns": {"textcraft": 2}, "rows": [row]}
split = sys.argv[sys.argv.index("--split") + 1]
results = {"model": "a path", "split": split, "settings": {}, "samples": [4], "blocks": [block]}
(out / "results.json").write_text(json.dumps(results))
(out / "episodes.jsonl").write_text(os.environ[f"PLAYED_{out.name.upper()}"])
"""


def journal(*successes: str, turns: int = 1) -> str:
    """Return the file of an evaluation with a task for each text, which has a letter an episode: won, lost, broken."""
    turn = {"text": "", "observation": "", "reward": 0.0, "tokens": 1}
    ends = {"w": StopReason.TERMINATED, "l": StopReason.TERMINATED, "b": StopReason.ENV_ERROR}
    lines = [
        Line(
            env="textcraft",
            task=f"textcraft/{task}",
            category="depth1",
            sample=sample,
            stop=ends[end],
            success=end == "w",
            generate_s=0.0,
            environment_s=0.0,
            prompt="",
            turns=tuple(TurnRecord.model_validate(turn) for _ in range(turns)),
        ).model_dump_json()
        for task, ends_of_task in enumerate(successes)
        for sample, end in enumerate(ends_of_task)
    ]
    return "\n".join([json.dumps({"settings": {}}), *lines, ""])


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a study whose evaluations are a program of a few lines; real ones play in CI's studies."""
    for name, text in (
        ("base.toml", BASE),
        ("study.toml", TABLE),
        ("child.py", CHILD),
        ("eval.py", EVALUATION),
    ):
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("ROW", json.dumps(ROW))
    monkeypatch.setenv("PLAYED_BEFORE", journal("llll", "wlll", "wwll"))
    monkeypatch.setenv("PLAYED_AFTER", journal("llll", "wwll", "wwww"))

    def commands(*asked: Any) -> list[list[str]]:
        return [
            [sys.executable, str(tmp_path / "eval.py"), *words[4:]]
            for words in table_commands(*asked)
        ]

    monkeypatch.setattr(runs, "table_commands", commands)
    return tmp_path


carry_out = partial(carry_out_study, seeds=[0], only=["low"])


def test_a_run_plays_its_tables_once_before_its_checkpoints_go(place: Path) -> None:
    assert carry_out(place) == 0
    played = (place / "out" / "played").read_text().splitlines()
    assert played == ["low-seed0 before step-000003", "low-seed0 after step-000013"]
    assert not (place / "out" / "low-seed0" / "checkpoints").exists()
    results = json.loads((place / "out" / "results.json").read_text())
    tables = results["runs"][0]["tables"]
    assert tables["after"] == {
        "split": "validation",
        "settings": {},
        "samples": [4],
        "blocks": [
            {"turns": {"textcraft": 2}, "rows": [ROW | {"success_rate": 0.5, "turns_mean": 3.0}]}
        ],
    }
    report = (place / "out" / "report.md").read_text()
    assert "## The 27 tasks: low, seed 0" in report
    assert "|scenario|task|n|before RL on validation, %|after RL on validation, %|turns|" in report
    assert "|Games|Depth 1|8|25 (10, 60)|50 (10, 60)|3.0, 3.0|" in report
    # Differences of 0, 25 and 50 points: t = √3 with two degrees of freedom.
    assert "|Games|3|+25.0 (-37.1, +87.1)|0.225|" in report

    assert carry_out(place) == 0
    assert (place / "out" / "played").read_text().splitlines() == played


def test_what_rl_adds_is_tested_over_tasks_and_a_broken_episode_is_none(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLAYED_BEFORE", journal("lbbb", "lllb", "bbbb"))
    monkeypatch.setenv("PLAYED_AFTER", journal("wwww", "wwww", "wwww"))
    assert carry_out(place) == 0
    results = json.loads((place / "out" / "results.json").read_text())
    assert results["runs"][0]["tables"]["paired"] == [
        {"scenario": "Games", "tasks": 2, "difference": 1.0, "tested": None, "p": None}
    ], "equal differences have no spread to test, and a task without a valid episode has no rate"
    assert "|Games|2|+100.0||" in (place / "out" / "report.md").read_text()


def test_episodes_of_too_many_turns_are_lost_in_the_pairs_as_in_the_table(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLAYED_AFTER", journal("wwww", "wwww", "wwww", turns=3))
    assert carry_out(place) == 0
    paired = json.loads((place / "out" / "results.json").read_text())["runs"][0]["tables"]["paired"]
    assert paired[0]["difference"] == pytest.approx(-0.25)


def test_a_table_that_fails_keeps_the_checkpoints_and_is_played_again(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BREAK", "after")
    assert carry_out(place) == 1
    assert (place / "out" / "low-seed0" / "checkpoints").exists()
    monkeypatch.delenv("BREAK")
    assert carry_out(place) == 0
    played = [line.split()[1] for line in (place / "out" / "played").read_text().splitlines()]
    assert played == ["before", "after", "before", "after"], (
        "`eval` itself resumes: a complete table takes it seconds"
    )


def test_the_checkpoint_that_ends_imitation_must_outlast_rl(place: Path) -> None:
    # Imitation ends at 3; RL writes 4, 8, 12 and, at its end, 13.
    four = ["--learner.checkpoint_every=4"]
    assert carry_out(place, overrides=[*four, "--learner.keep_checkpoints=5"]) == 0
    message = "the checkpoint of step 3, and learner.keep_checkpoints is 4, so that RL removes it: give 5 or more"
    with pytest.raises(ConfigError, match=message):
        carry_out(place, overrides=[*four, "--learner.keep_checkpoints=4"])


def test_without_imitation_the_model_as_it_came_is_played(place: Path) -> None:
    study = study_of(place, STUDY)
    config = plan(study, place / "out")[0].config
    table = TableFile(tasks=2, samples=4)
    before, after = table_commands(Path("RUN"), config, table, "test")
    assert before[4:7] == [config.model.name, "--recipe", "RUN/config.toml"]
    assert (
        after[4:]
        == (
            "RUN/checkpoints/step-000010 --table --split test --tasks 2 --samples 4 "
            "--out RUN/tables/after"
        ).split()
    )
