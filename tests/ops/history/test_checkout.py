"""Versions come from a kept file, or from the log, with the digest of the ledger."""

import json
from pathlib import Path

import pytest

from horizonrl.broker.weights.frames import digest_file
from horizonrl.ops.cli.main import main
from horizonrl.ops.history.checkout import kept_weights
from horizonrl.ops.models.tiny_model import make_tiny_model
from horizonrl.ops.rundir.directory import read_config, write_config
from horizonrl.ops.rundir.lines import read_lines
from tests.learner.world import World
from tests.ops.history.runs import RECORDED, record


@pytest.fixture
def run(tmp_path: Path) -> World:
    model = make_tiny_model(tmp_path / "model")
    return record(
        tmp_path / "checkout",
        f"--model.name={model}",
        "--learner.backend=hash",
        "--actor.engine=scripted",
    )


def check_out(run: World, version: int, out: Path) -> int:
    return main(
        ["history", "checkout", str(run.config.run_dir), f"--version={version}", f"--out={out}"]
    )


def test_every_version_is_had_from_a_file_or_from_the_log(run: World, tmp_path: Path) -> None:
    kept = dict(kept_weights(run.config.run_dir))
    assert 0 < len(kept) < RECORDED
    kept[RECORDED].write_text("a bit flipped")  # and is not what the ledger says
    for line in run.ledger():
        out = tmp_path / f"version-{line['version']}"
        assert check_out(run, line["version"], out) == 0
        assert digest_file(out / "model.safetensors") == line["weights_digest"]
        facts = json.loads((out / "version.json").read_text())
        assert (facts["step"], facts["run"]) == (line["step"], "run")


def test_what_can_no_longer_be_made_is_told_with_what_can(
    run: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = run.config.run_dir
    write_config(read_config(run_dir, ["--learner.keep_log=false"]))
    assert check_out(run, 3, tmp_path / "out") == 1
    said = capsys.readouterr().err
    assert "version 3 of" in said and "learner.keep_log = true" in said
    assert "kept are the weights of 9, 10, 11; all from 10 on can be made again" in said
    assert check_out(run, RECORDED + 1, tmp_path / "out") == 2
    assert f"it holds 1 to {RECORDED}" in capsys.readouterr().err


def test_other_weights_than_the_ledger_has_are_refused(
    run: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = run.config.run_dir / "ledger.jsonl"
    lines = read_lines(ledger)
    lines[4]["weights_digest"] = "f" * 32
    ledger.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert check_out(run, 5, tmp_path / "out") == 1
    assert "was trained again from step 0, to other weights" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
