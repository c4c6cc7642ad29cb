"""What no writer would write is refused with a typed error. `python -m tests.faults fuzz` does so a million times."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from horizonrl.broker import codec
from horizonrl.broker.codec import TYPES
from tests.faults import fuzz


def test_mutated_payloads_decode_or_raise_a_record_error_within_bounded_memory(
    tmp_path: Path,
) -> None:
    file = tmp_path / "report.json"
    command = [sys.executable, "-m", "tests.faults", "fuzz", "--payloads", "5000", "--seed", "0"]
    # In a process of its own, whose memory nothing else uses.
    done = subprocess.run(
        [*command, "--json", str(file)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(file.read_text())
    assert report["failed"] == []
    assert report["holds"], report
    outcomes = report["outcomes"]
    assert sum(outcomes.values()) == 10_000
    assert all(
        outcomes[outcome] > 100 for outcome in ("decoded", "MalformedRecord", "UnknownSchema")
    ), report
    assert {"trained", "void", "phase", "malformed"} <= set(report["settled"]), report


def test_every_type_that_travels_is_fuzzed() -> None:
    assert {type(record) for record in fuzz.records()} == set(TYPES)


def test_a_defect_of_the_decoder_is_found_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codec, "_refuse_extension", lambda code, data: {}[code])
    assert fuzz.run(payloads=2_000, seed=0, json_file=tmp_path / "report.json") == 1
    assert "KeyError" in (tmp_path / "report.json").read_text()
