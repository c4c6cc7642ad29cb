import json
from pathlib import Path

import pytest

from horizonrl.ops.bench.speed import broker


@pytest.mark.process
def test_durabilities_and_replicas_are_measured_in_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker, "ROUNDS", 1)
    monkeypatch.setattr(broker, "ROUND_MESSAGES", 4)
    assert broker.run(tmp_path / "broker.json") == 0
    report = json.loads((tmp_path / "broker.json").read_text())
    assert set(report) == set(broker.SIZES)
    for line in report.values():
        assert line["ratio"] == pytest.approx(line["process_per_s"] / line["power_per_s"])
        assert line["replicas_ratio"] == pytest.approx(line["process_per_s"] / line["process_r3_per_s"])
