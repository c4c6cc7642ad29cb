"""The chaos suite's short form: real processes, killed, stopped, delayed and repeated, and nothing lost."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

KILLS = 10


@pytest.mark.process
@pytest.mark.timeout(480)
def test_a_run_comes_through_ten_random_events_with_nothing_lost_and_nothing_done_twice(
    tmp_path: Path,
) -> None:
    answer = tmp_path / "chaos.json"
    command = [sys.executable, "-m", "tests.faults", "chaos", "--kills", str(KILLS), "--seed", "7"]
    done = subprocess.run(
        [*command, "--json", str(answer), "--directory", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=450,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(answer.read_text())
    assert found["passed"]
    assert found["kills"] == sum(found["by_event"].values()) == KILLS
    assert len(found["by_event"]) >= 3
    assert all(6 * hits >= KILLS for hits in found["by_role"].values())
    assert (
        found["lost"]
        == found["doubled"]
        == found["staleness_violations"]
        == found["horizon_violations"]
        == 0
    )
    assert found["ledger_consistent"]
    assert found["digest_equal"]
    assert found["digests_compared"] == found["steps"]
    assert (
        sum(found["issued"].values())
        == found["trained"] + sum(found["dropped"].values()) + found["void"]
    )
    assert found["learner_restarts"] >= 1
    assert found["lineages"] >= 2
