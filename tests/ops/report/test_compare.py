"""Several runs and evaluations on one page, and one evaluation alone."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from horizonrl.common.errors import ConfigError
from horizonrl.common.statistics import newcombe, paired_interval, wilson
from horizonrl.ops.cli.main import main
from horizonrl.ops.report.compare import MOST, comparison, read_compared
from horizonrl.ops.report.judged import read_judged
from tests.ops.report.evaluations import write_evaluation
from tests.ops.report.runs import evaluation, run_config, write_run


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Two finished runs, of which the second learnt more slowly, with another learning rate."""
    fast = write_run(run_config(tmp_path / "a", "--run.name=fast"))
    slow = write_run(run_config(tmp_path / "b", "--run.name=slow", "--rl.lr=1e-6"), seed=1)
    lines = (slow / "evals.jsonl").read_text().splitlines()
    (slow / "evals.jsonl").write_text(
        "\n".join(lines[:2]) + "\n" + json.dumps(evaluation(6, 12, 7)) + "\n"
    )
    return [fast, slow]


def facts(*places: Path) -> dict[str, Any]:
    return comparison(read_compared(places))


def test_runs_are_compared_by_their_last_evaluation_as_independent_samples(
    runs: list[Path],
) -> None:
    shown = facts(*runs)
    assert [subject["name"] for subject in shown["subjects"]] == ["fast", "slow"]
    assert shown["subjects"][0]["badges"] == ["finished", "step 6 of 6", "grpo", "staged horizon"]
    (row,) = shown["rows"]
    assert row["task"] == "textcraft depth1"
    first, second = row["cells"]
    assert (first["value"], first["low"], first["high"]) == (30 / 64, *wilson(30, 64))
    assert first["difference"] is None
    difference = second["difference"]
    assert (difference["low"], difference["high"]) == newcombe((12, 64), (30, 64))
    assert difference["value"] == pytest.approx(-18 / 64)
    assert (difference["differs"], difference["how"]) == (True, "as independent samples")
    assert ["rl.lr", "1e-05", "1e-06"] in shown["settings"] or "rl.lr" in [
        key for key, *_ in shown["settings"]
    ]
    assert all(key != "run.name" for key, *_ in shown["settings"])


def test_curves_have_a_series_per_run_with_intervals(runs: list[Path]) -> None:
    shown = facts(*runs)["curves"]
    held_out, training, *others = shown
    assert [held_out["title"], training["title"]] == ["Held-out success", "Success in training"]
    for curve in (held_out, training):
        assert [(one["name"], one["colour"]) for one in curve["series"]] == [
            ("fast", 0),
            ("slow", 1),
        ]
        for one in curve["series"]:
            for low, value, high in zip(one["low"], one["y"], one["high"], strict=True):
                assert low <= value <= high
    assert held_out["series"][0]["x"] == [0, 3, 6]
    assert training["series"][0]["x"] == [1, 2, 3, 4, 5, 6]
    assert {"Reward", "Loss"} & {curve["title"] for curve in others} or len(others) > 5
    assert all(curve["bands"] for curve in shown)


def test_evaluations_are_compared_task_by_task(tmp_path: Path) -> None:
    better = write_evaluation(tmp_path / "better", [True, True, False])
    worse = write_evaluation(tmp_path / "worse", [False, True, False], broken=1)
    shown = facts(worse, better)
    whole, *parts = shown["rows"]
    assert (whole["task"], len(parts)) == ("all", len({part["task"] for part in parts}))
    first, second = whole["cells"]
    # The first task broke in one of them: there is no pair of it.
    pairs = [1.0 if number % 3 == 0 else 0.0 for number in range(1, second["episodes"])]
    assert first["episodes"] == second["episodes"] - 1
    assert second["difference"]["value"] == pytest.approx(sum(pairs) / len(pairs))
    assert (second["difference"]["low"], second["difference"]["high"]) == pytest.approx(
        paired_interval(pairs)
    )
    assert second["difference"]["how"] == f"{len(pairs)} tasks, in pairs"
    assert ["model.weights", "worse", "better"] in shown["settings"]
    assert "1 broken" in shown["subjects"][0]["badges"]
    assert shown["curves"] == []


def test_what_did_not_play_the_same_is_not_compared_as_a_whole(
    runs: list[Path], tmp_path: Path
) -> None:
    shown = facts(runs[0], write_evaluation(tmp_path / "other", [True]))
    assert shown["rows"][0]["cells"][1]["difference"] is None
    assert any("did not play the same" in notice for notice in shown["notices"])
    assert any("last evaluation during training" in notice for notice in shown["notices"])
    depth1 = next(row for row in shown["rows"] if row["task"] == "textcraft depth1")
    assert depth1["cells"][1]["difference"]["how"] == "as independent samples"


def test_a_category_without_a_valid_episode_has_an_empty_cell(runs: list[Path]) -> None:
    last = evaluation(6, 12, 7)
    broken = {"episodes": 0, "successes": 0, "success_rate": None, "low": None, "high": None}
    played = last["environments"]["textcraft"]["categories"]["depth1"]
    last["environments"]["textcraft"]["categories"] = {"depth1": broken, "depth2": played}
    (runs[1] / "evals.jsonl").write_text(json.dumps(last) + "\n")
    for first, second in ((0, 1), (1, 0)):
        row = next(
            row
            for row in facts(runs[first], runs[second])["rows"]
            if row["task"] == "textcraft depth1"
        )
        assert [cell is None for cell in row["cells"]] == [first == 1, second == 1]


def test_an_evaluation_whose_results_are_cut_short_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = write_evaluation(tmp_path / "judged", [True])
    (directory / "results.json").write_text('{"model": "x", ')
    assert main(["report", str(directory)]) == 2
    assert "results.json is cut short or damaged" in capsys.readouterr().err


def test_a_run_without_evaluations_has_curves_and_no_number(runs: list[Path]) -> None:
    (runs[1] / "evals.jsonl").unlink()
    shown = facts(*runs)
    assert shown["rows"][0]["cells"][1] is None
    assert any("slow has no complete evaluation" in notice for notice in shown["notices"])
    assert shown["subjects"][1]["badges"][0] == "stopped"
    assert len(shown["curves"][1]["series"]) == 2


def test_directories_of_one_name_are_told_apart_and_what_cannot_be_compared_is_refused(
    tmp_path: Path, runs: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    for place in ("x", "y"):
        shutil.copytree(runs[0], tmp_path / place / "small")
    assert [each.name for each in read_compared([tmp_path / "x/small", tmp_path / "y/small"])] == [
        "x/small",
        "y/small",
    ]
    with pytest.raises(ConfigError, match="given twice"):
        read_compared([runs[0], runs[0]])
    with pytest.raises(ConfigError, match=f"compares {MOST} at most"):
        read_compared([tmp_path / str(number) for number in range(MOST + 1)])
    assert main(["report", str(runs[0]), str(tmp_path / "x")]) == 2
    assert "is no run directory" in capsys.readouterr().err
    assert main(["report", *map(str, runs), "--model.name", "x"]) == 2
    assert (
        "--model.name: keys of the config change the report of one run only"
        in capsys.readouterr().err
    )


def test_the_command_writes_one_file_of_several_or_of_an_evaluation(
    tmp_path: Path,
    runs: list[Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report", *map(str, runs)]) == 0
    assert "2 compared" in capsys.readouterr().out
    directory = write_evaluation(tmp_path / "judged", [True, False], broken=2)
    assert main(["report", str(directory)]) == 0
    assert re.search(r"report\.html: \d+ episodes", capsys.readouterr().out)
    for page in (tmp_path / "comparison.html", directory / "report.html"):
        text = page.read_text()
        assert "connect-src" not in text.partition("</head>")[0]
        assert "default-src 'none'" in text


def test_an_evaluation_has_its_table_its_settings_and_its_episodes(tmp_path: Path) -> None:
    shown, episodes = read_judged(write_evaluation(tmp_path / "judged", [True, False], broken=2))
    results = json.loads((tmp_path / "judged" / "results.json").read_text())
    assert shown["blocks"][0]["rows"] == results["blocks"][0]["rows"]
    assert [number["label"] for number in shown["headline"]] == [
        "Success in parity",
        "Success in textcraft",
    ]
    assert any(notice.startswith("2 of") and "broke" in notice for notice in shown["notices"])
    assert json.loads(shown["settings"])["model"] == {"weights": "judged"}
    # The last wins.
    whole = {
        row["scenario"]: row["episodes"] + row["broken"] for row in results["blocks"][0]["rows"]
    }
    assert len(episodes.rows) == sum(whole.values())
    assert [row[2] for row in episodes.rows[:4]] == [
        "broken: env_error",
        "broken: env_error",
        "success",
        "failure",
    ]
    assert episodes.rows[2][5] == 7  # tokens, though their ids are not known


def test_an_evaluation_that_goes_on_says_so(tmp_path: Path) -> None:
    shown, episodes = read_judged(write_evaluation(tmp_path / "begun", [True], complete=False))
    assert shown["blocks"] == []
    assert "not complete" in shown["notices"][0]
    assert episodes.rows
