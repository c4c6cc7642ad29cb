"""The bench of the gateway, with scripted replies."""

import json
from pathlib import Path

import pytest

from horizonrl.ops.bench.speed import gateway, talker
from horizonrl.ops.cli.main import main


@pytest.mark.process
def test_programs_and_rollouts_are_measured_in_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gateway, "ROUNDS", 1)
    for module in (gateway, talker):
        monkeypatch.setattr(module, "TALKERS", 3)
    out = tmp_path / "gateway.json"
    assert main(["bench", "gateway", "--small", "--json", str(out)]) == 0
    result = json.loads(out.read_text())
    assert [len(result[way]) for way in ("native", "gateway")] == [1, 1]
    assert result["ratio"] == result["gateway"][0] / result["native"][0] > 0
    assert "gateway / native" in capsys.readouterr().out
