"""What no writer would write is refused with a typed error. `horizonrl bench fuzz` does the same a million times."""

from pathlib import Path

import pytest

from horizonrl.broker import codec
from horizonrl.broker.codec import TYPES
from horizonrl.ops.bench.faults import fuzz


def test_mutated_payloads_decode_or_raise_a_record_error_within_bounded_memory() -> None:
    report = fuzz.fuzz(payloads=20_000, seed=0)
    assert report.failed == []
    assert report.holds, report
    assert sum(report.outcomes.values()) == 40_000
    assert all(report.outcomes[outcome] > 100 for outcome in ("decoded", "MalformedRecord", "UnknownSchema")), report
    assert {"trained", "void", "phase", "malformed"} <= set(report.settled), report


def test_every_type_that_travels_is_fuzzed() -> None:
    assert {type(record) for record in fuzz.records()} == set(TYPES)


def test_a_defect_of_the_decoder_is_found_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "_refuse_extension", lambda code, data: {}[code])
    assert fuzz.run(payloads=2_000, seed=0, json_file=tmp_path / "report.json") == 1
    assert "KeyError" in (tmp_path / "report.json").read_text()
