"""The program for a CUDA machine, on CPU: every row is made, and what must be equal is."""

import json
from pathlib import Path

import pytest

from horizonrl.ops.bench.gpu import main


@pytest.mark.process
def test_on_cpu_a_tiny_model_repeats_and_resumes(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    assert main(["--device", "cpu", "--episodes", "4", "--tokens", "64", "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    rows = {row["what"]: row for row in report["rows"]}
    assert rows["two steps from one start"]["good"]
    assert rows["a step after a resume"]["good"]
    assert report["parts"]["own"]["checkpoint_bytes"] == pytest.approx(
        report["parts"]["own"]["planned_checkpoint"], rel=0.05
    )
