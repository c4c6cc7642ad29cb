"""`python -m tests.scale` in small: real processes, a row with every number, and a restart."""

import asyncio
import json
from dataclasses import asdict
from pathlib import Path

import pytest

from horizonrl.common.errors import RunFailed
from tests.processes import make_tiny_model_apart
from tests.scale.__main__ import main
from tests.scale.long_run import bookkeeping_s, restart
from tests.scale.rows import forecast_s
from tests.scale.scaled_run import GROUPS_PER_S, running
from tests.scale.table import ROWS

pytestmark = pytest.mark.process

LONG_S = 150
"""The large steps and the restarts, which come after the rows."""


def test_a_row_has_what_a_settled_group_costs(tmp_path: Path) -> None:
    report = tmp_path / "scale.json"
    assert main(["--small", "--actors", "20", "--json", str(report)]) == 0
    (row,) = json.loads(report.read_text())["rows"]
    assert row["actors"] == 20
    for name in ("groups_per_s", "messages_per_group", "bytes_per_group", "cpu_ms_per_group"):
        assert row[name] > 0
    roles = ("server", "controller", "learner")
    assert row["cpu_ms_per_group"] == pytest.approx(
        sum(row[f"{role}_ms_per_group"] for role in roles)
    )
    assert row["cpu_ms_low"] <= row["cpu_ms_high"]
    # What is measured begins and ends with a step. More than the rate asks for would be a second copy of something.
    assert row["steps"] >= row["windows"] >= 2
    assert row["groups_per_s"] < 2 * GROUPS_PER_S
    # Twelve are the least; polling, announcements and weights come on top.
    assert row["messages_per_group"] < 60


def test_a_row_whose_process_ends_fails_with_its_log(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path / "row", tmp_path / "model", actors=1) as scaled:
            await scaled.start_role("learner")
            scaled.processes[0].kill()
            await scaled.processes[0].wait()
            await scaled.until_step(1_000_000)

    make_tiny_model_apart(tmp_path / "model")
    with pytest.raises(RunFailed, match=r"step 1000000 has not come, and process \d+ has ended"):
        asyncio.run(scenario())


def test_the_rows_of_the_whole_table_take_a_quarter_of_an_hour_at_most() -> None:
    rows_s = [forecast_s(actors, small=False) for actors in ROWS]
    assert sum(rows_s) + LONG_S < 15 * 60


def test_a_long_run_starts_again_and_a_large_step_is_settled(tmp_path: Path) -> None:
    after = asyncio.run(restart(tmp_path / "long", tickets=200_000, outstanding=300))
    assert after.ledger_bytes > 200_000 * 30
    # Its end is read, and not the whole file.
    assert after.learner_peak_mib < after.ledger_bytes / 2**20, asdict(after)
    ledger = (tmp_path / "long" / "long" / "ledger.jsonl").read_text().splitlines()
    assert json.loads(ledger[-1])["step"] == 200
    assert bookkeeping_s(50) > 0
