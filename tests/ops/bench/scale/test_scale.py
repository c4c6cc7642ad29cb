"""`bench scale` in small: real processes, a row with every number, and a restart."""

import asyncio
import json
from dataclasses import asdict
from pathlib import Path

import pytest

from horizonrl.ops.bench.scale.long_run import bookkeeping_s, restart
from horizonrl.ops.cli.main import main

pytestmark = pytest.mark.process


def test_a_row_has_what_a_settled_group_costs(tmp_path: Path) -> None:
    report = tmp_path / "scale.json"
    assert main(["bench", "scale", "--small", "--actors", "20", "--json", str(report)]) == 0
    (row,) = json.loads(report.read_text())["rows"]
    assert row["actors"] == 20
    for name in ("groups_per_s", "messages_per_group", "bytes_per_group", "cpu_ms_per_group"):
        assert row[name] > 0
    # Twelve are the least; polling, announcements and weights come on top.
    assert row["messages_per_group"] < 60


def test_a_long_run_starts_again_and_a_large_step_is_settled(tmp_path: Path) -> None:
    after = asyncio.run(restart(tmp_path / "long", tickets=200_000, outstanding=300))
    assert after.ledger_bytes > 200_000 * 30
    # Its end is read, and not the whole file.
    assert after.learner_peak_mib < after.ledger_bytes / 2**20, asdict(after)
    ledger = (tmp_path / "long" / "long" / "ledger.jsonl").read_text().splitlines()
    assert json.loads(ledger[-1])["step"] == 200
    assert bookkeeping_s(50) > 0
