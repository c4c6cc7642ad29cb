"""What a case and a row say, and that the table is written whatever is missing."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

import pytest

from horizonrl.common.errors import ConfigError, RunFailed
from horizonrl.ops.bench import run as bench
from horizonrl.ops.bench.case import NOBODY, Case, Request, Row, Side, constant, measure, rate
from horizonrl.ops.cli.main import main


def test_the_ratio_is_the_median_of_rounds_and_its_spread_their_extremes() -> None:
    facts = Row("speed", "them", "tokens/s", [10.0, 30.0, 20.0], [10.0, 10.0, 10.0], goal=1.0).facts
    assert (facts["ratio"], facts["low"], facts["high"]) == (2.0, 1.0, 3.0)
    assert (facts["what"], facts["peer"], facts["goal"], facts["rounds"]) == (
        "speed",
        "them",
        1.0,
        3,
    )


def test_of_what_is_no_rate_less_is_better() -> None:
    assert Row("start", "them", "s", [2.0], [6.0]).facts["ratio"] == 3.0
    assert Row("rate", "them", "steps/s", [2.0], [6.0]).facts["ratio"] == 1 / 3


def test_a_row_without_a_peer_has_no_ratio() -> None:
    facts = Row("memory", NOBODY, "MiB", [5.0], ()).facts
    assert (facts["ratio"], facts["low"], facts["theirs"], facts["ours"]) == (None, None, None, 5.0)


def in_turns(name: str, log: list[str], values: Iterator[float], unit: str = "steps/s") -> Side:
    async def side() -> Mapping[str, float]:
        log.append(name)
        return {unit: next(values)}

    return side


def test_sides_take_turns_and_swap_and_a_warm_up_does_not_count() -> None:
    log: list[str] = []
    sides = {
        "ours": in_turns("ours", log, iter([99.0, 4.0, 6.0])),
        "them": in_turns("them", log, iter([99.0, 2.0, 3.0])),
    }
    case = Case("speed", sides, {"them": 1.5}, rounds=2, warms_up=True, swaps=True)
    (row,) = asyncio.run(measure(case, Request()))
    assert log == ["them", "ours", "ours", "them", "them", "ours"]
    assert (row.ours, row.theirs, row.goal) == ([4.0, 6.0], [2.0, 3.0], 1.5)


def test_each_unit_is_a_row_and_a_goal_is_of_the_first() -> None:
    async def ours() -> Mapping[str, float]:
        return {"s": 2.0, "MiB": 10.0}

    async def them() -> Mapping[str, float]:
        return {"s": 4.0}

    case = Case(
        "start", {"ours": ours, "them": them, "goal of 1 s": constant("s", 1.0)}, {"them": 1.0}
    )
    rows = asyncio.run(measure(case, Request(small=True)))
    assert [(row.peer, row.unit, row.goal) for row in rows] == [
        ("them", "s", 1.0),
        ("goal of 1 s", "s", None),
        (NOBODY, "MiB", None),
    ]


async def fails() -> Mapping[str, float]:
    raise RunFailed("it is not there")


def test_a_peer_that_fails_is_left_out_and_ours_is_not() -> None:
    request = Request()
    case = Case("speed", {"ours": rate("steps/s", 1, lambda: None), "them": fails}, rounds=2)
    (row,) = asyncio.run(measure(case, request))
    assert (row.peer, len(row.ours)) == (NOBODY, 2)
    assert {what: str(error) for what, error in request.absent.items()} == {
        "speed: them": "it is not there"
    }
    with pytest.raises(RunFailed, match="it is not there"):
        asyncio.run(measure(Case("speed", {"ours": fails}), Request()))


async def cases(request: Request) -> AsyncIterator[Case]:
    """Stand for a group of rows: one case that works and misses its goal, and one that fails."""
    sides = {"ours": constant("tokens/s", 5.0), "them": constant("tokens/s", 10.0)}
    yield Case("speed", sides, {"them": 1.0})
    yield Case("broken", {"ours": fails})


@pytest.mark.parametrize(("small", "code"), [(True, 0), (False, 1)])
def test_rows_that_cannot_be_measured_leave_the_others_and_a_missed_goal_is_an_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], small: bool, code: int
) -> None:
    out = tmp_path / "speed.json"
    assert bench.measure_and_print({"group": __name__}, Request(small=small), out) == code
    report = json.loads(out.read_text())
    assert [row["ratio"] for row in report["rows"]] == [0.5]
    assert report["not_measured"] == {"broken": "it is not there"}
    assert {"cpu", "cores", "versions"} <= set(report["machine"])
    assert "not measured: broken: it is not there" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["rollout", "queues:textcraft", "envs:textcarft"])
def test_unknown_rows_are_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigError, match=r"rollouts|textcraft"):
        bench.run([name], Request(), None)


@pytest.mark.process
def test_groups_are_measured_in_small_each_in_a_process_of_its_own(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    assert main(["bench", "queues", "durability", "--small", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert all(row["ours"] > 0 for row in rows)
    peers = {(row["what"], row["peer"]) for row in rows}
    assert ("groups through the broker", "raw JetStream (nats-py)") in peers
    assert ("ticket of 300 bytes, process, R1", "power, R3") in peers


@pytest.mark.process
def test_an_environment_is_measured_here_served_and_in_workers(tmp_path: Path) -> None:
    out = tmp_path / "envs.json"
    assert main(["bench", "envs:parity", "--small", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    rates = [row for row in rows if row["unit"] == "steps/s"]
    assert [row["what"] for row in rates] == [
        f"parity {how}, {clients} clients"
        for how in ("here", "served", "served by 2 workers")
        for clients in (1, 32)
    ]
    assert all(row["ours"] > 0 for row in rates)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["rollouts", "starts", "learner"])
def test_the_rows_that_start_engines_are_measured_in_small(tmp_path: Path, name: str) -> None:
    out = tmp_path / "rows.json"
    assert main(["bench", name, "--small", "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["rows"]
    assert not report["not_measured"]
