import json
from pathlib import Path

import pytest

from horizonrl.common.config.schema import RunConfig
from horizonrl.ops.cli.main import main
from horizonrl.ops.rundir.directory import write_config
from tests.ops.runs import EVAL

LINE = {
    "step": 1,
    "version": 1,
    "lineage": 2,
    "cursor": 9,
    "trained": [[4, "train-00000001"]],
    "dropped": [[5, "train-00000002", "stale"]],
    "voids": [[6, "train-00000000"]],
    "repeats": 1,
    "data_digest": "d" * 32,
    "weights_digest": "e" * 32,
}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    config = RunConfig.load([], [f"--run.root={tmp_path}"])
    write_config(config)
    (config.run_dir / "ledger.jsonl").write_text(json.dumps(LINE) + "\n")
    (config.run_dir / "evals.jsonl").write_text(json.dumps(EVAL) + "\n")
    resumed = {"lineage": 2, "from_step": 1, "time": 0, "changed": {"rl.lr": [1e-5, 1e-6]}}
    (config.run_dir / "lineages.jsonl").write_text(json.dumps(resumed) + "\n")
    return config.run_dir


def test_a_version_is_traced_to_its_groups(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["history", "lineage", str(run_dir), "--version", "1"]) == 0
    shown = capsys.readouterr().out
    for word in (
        "train-00000001",
        "trained",
        "dropped (stale)",
        "void",
        "e" * 32,
        "rl.lr 1e-05 → 1e-06",
    ):
        assert word in shown


@pytest.mark.parametrize(
    ("ticket", "end"),
    [
        ("train-00000001", "trained into version 1 (lineage 2), log entry 4"),
        ("train-00000002", "dropped (stale) before version 1 (lineage 2), log entry 5"),
        ("train-00000000", "void before version 1 (lineage 2), log entry 6"),
        ("eval-00000003", "evaluated, in the evaluation of version 4, log entry 9"),
    ],
)
def test_a_ticket_is_traced_to_its_end(
    run_dir: Path, ticket: str, end: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["history", "lineage", str(run_dir), "--ticket", ticket]) == 0
    assert capsys.readouterr().out == f"{ticket}: {end}\n"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (["--version", "7"], "it holds 1 to 1"),
        (["--ticket", "train-00000009"], "ids look like train-00000042"),
    ],
)
def test_what_the_ledger_does_not_hold_is_said(
    run_dir: Path, asked: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["history", "lineage", str(run_dir), *asked]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (["--from", "4"], "has no checkpoint of step 4"),
        (["--from", "0", "--to", "9"], "nothing can be replayed"),
    ],
)
def test_a_replay_that_is_not_possible_says_what_is(
    run_dir: Path, asked: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["history", "replay", str(run_dir), *asked]) in (1, 2)
    assert message in capsys.readouterr().err
