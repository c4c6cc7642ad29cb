"""What a row of the performance table says, and that the table is written whatever is missing."""

import json
from pathlib import Path

import pytest

from horizonrl.common.errors import ConfigError, RunFailed
from horizonrl.ops.bench.table import run as table
from horizonrl.ops.bench.table.rows import NOBODY, Request, Row, against_limit
from horizonrl.ops.cli.main import main


def test_the_ratio_is_the_median_of_rounds_and_its_spread_their_extremes() -> None:
    facts = Row("speed", "them", "tokens/s", [10.0, 30.0, 20.0], [10.0, 10.0, 10.0], goal=1.0).facts
    assert (facts["ratio"], facts["low"], facts["high"]) == (2.0, 1.0, 3.0)
    assert (facts["what"], facts["peer"], facts["goal"], facts["rounds"]) == ("speed", "them", 1.0, 3)


def test_with_seconds_the_ratio_tells_how_many_times_faster_ours_is() -> None:
    assert Row("start", "them", "s", [2.0], [6.0], less_is_better=True).facts["ratio"] == 3.0
    assert against_limit("start", "s", [12.0], 6.0).facts["ratio"] == 0.5
    assert against_limit("rate", "steps/s", [100.0], 200.0, less_is_better=False).facts["ratio"] == 0.5


def test_a_row_without_a_peer_has_no_ratio() -> None:
    facts = Row("memory", NOBODY, "MiB", [5.0], ()).facts
    assert (facts["ratio"], facts["low"], facts["theirs"], facts["ours"]) == (None, None, None, 5.0)


def fails(_: Request) -> list[Row]:
    raise RunFailed("its peer is not there")


def works(_: Request) -> list[Row]:
    return [Row("speed", "them", "tokens/s", [5.0], [10.0], goal=1.0)]


@pytest.mark.parametrize(("small", "code"), [(True, 0), (False, 1)])
def test_rows_that_cannot_be_measured_leave_the_others_and_a_missed_goal_is_an_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], small: bool, code: int
) -> None:
    monkeypatch.setattr(table, "MEASURES", {"broken": f"{__name__}:fails", "working": f"{__name__}:works"})
    monkeypatch.setattr(table, "import_module", lambda _: __import__("sys").modules[__name__])
    assert table.run(Request(small=small), tmp_path / "speed.json", None) == code
    report = json.loads((tmp_path / "speed.json").read_text())
    assert [row["ratio"] for row in report["rows"]] == [0.5]
    assert report["not_measured"] == {"broken": "its peer is not there"}
    assert {"cpu", "cores", "versions"} <= set(report["machine"])
    assert "its peer is not there" in capsys.readouterr().out


def test_an_unknown_group_of_rows_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="rollouts"):
        table.run(Request(), None, "rollout")


@pytest.mark.process
def test_the_broker_is_measured_in_small(tmp_path: Path) -> None:
    out = tmp_path / "queues.json"
    assert main(["bench", "speed", "--small", "--only", "queues", "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["rows"], report["not_measured"]
    for row in report["rows"]:
        assert row["what"].startswith("groups through the broker")
        assert row["ours"] > 0


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["rollouts", "starts"])
def test_the_rows_that_start_engines_are_measured_in_small(tmp_path: Path, name: str) -> None:
    out = tmp_path / "rows.json"
    assert main(["bench", "speed", "--small", "--only", name, "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["rows"], report["not_measured"]
    assert not report["not_measured"]
