"""The rows of the gateway, with scripted replies."""

import json
from pathlib import Path

import pytest

from horizonrl.ops.bench import gateway, talker
from horizonrl.ops.cli.main import main


@pytest.mark.process
def test_programs_and_rollouts_are_measured_in_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (gateway, talker):
        monkeypatch.setattr(module, "TALKERS", 3)
    out = tmp_path / "gateway.json"
    assert main(["bench", "gateway", "--small", "--json", str(out)]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["peer"], row["rounds"]) == ("native rollouts", 1)
    assert row["ratio"] == row["ours"] / row["theirs"] > 0
