import asyncio
import io
import json
from pathlib import Path
from typing import Any

import pytest
import rich.console

from horizonrl.common.config import RunConfig
from horizonrl.common.types import DropReason, Kind, Outcomes, Progress
from horizonrl.ops.console import COLUMNS, Console, caption, mean_success, waiting_for

LINE: dict[str, Any] = {
    "step": 3,
    "time": 10.0,
    "phase": "rl",
    "horizon": 4,
    "episodes": 8,
    "success_rate": 0.5,
    "reward_mean": 0.5,
    "turns_mean": 2.5,
    "truncated_share": 0.25,
    "staleness_mean": None,
    "staleness_max": None,
    "groups_trained": 2,
    "groups_dropped": 1,
    "tickets_issued": 12,
    "tickets_outstanding": 4,
    "loss": 0.1,
    "logprob_gap": None,
    "generated_tokens_per_s": 100.0,
    "step_s": 2.0,
    "wait_s": 0.1,
}
EVAL: dict[str, Any] = {
    "version": 4,
    "lineage": 0,
    "success_rate": 0.43,
    "low": 0.331,
    "high": 0.54,
    "episodes": 64,
    "ends": [[9, "eval-00000003", "evaluated"], [10, "eval-00000004", "void"]],
}


def test_every_column_shows_a_line_of_the_journal_whatever_was_not_measured() -> None:
    assert all(cell(LINE) for cell in COLUMNS.values())


def test_the_caption_says_what_was_issued_and_where_it_is() -> None:
    assert caption([LINE]).startswith("tickets: 12 issued = 8 settled + 4 outstanding")


def test_success_over_steps_is_weighted_by_their_episodes() -> None:
    few, many = {"success_rate": 1.0, "episodes": 1}, {"success_rate": 0.0, "episodes": 3}
    assert mean_success([few, many, {"success_rate": None, "episodes": 0}]) == 0.25
    assert mean_success([]) is None


def test_the_table_fits_a_terminal_of_usual_width(tmp_path: Path) -> None:
    console = Console(RunConfig.load([], [f"--run.root={tmp_path}"]))
    out = io.StringIO()
    rich.console.Console(file=out, width=110).print(console._table([LINE] * 20, {"actor-0": 1}))
    shown = out.getvalue()
    assert "tok/s" in shown
    assert "restarted: actor-0 1x" in shown
    assert "…" not in shown


def test_a_long_wait_explains_itself() -> None:
    outcomes = {
        Kind.DEMO: Outcomes(trained=8),
        Kind.TRAIN: Outcomes(trained=2, dropped={DropReason.ZERO_VARIANCE: 3, DropReason.STALE: 1}, void=1),
    }
    said = waiting_for(Progress(outcomes=outcomes))
    assert said == "10 groups trained, 4 dropped (stale 1, zero_variance 3), 1 void"
    assert waiting_for(Progress(outcomes={Kind.EVAL: Outcomes(evaluated=4)})).endswith("0 void, 4 evaluated")
    assert waiting_for(None) == "the engines start"


def test_an_evaluation_is_told_once_even_if_a_resumed_learner_writes_it_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = RunConfig.load([], [f"--run.root={tmp_path}"])
    config.run_dir.mkdir()
    console = Console(config)
    for lines in ([EVAL], [], [EVAL, EVAL | {"version": 6, "success_rate": None, "low": 0.0, "high": 1.0}]):
        (config.run_dir / "evals.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        asyncio.run(console._tell_evaluations())
    assert capsys.readouterr().out.splitlines() == [
        "  version 4: eval 43 % (33-54 %) of 64 held-out episodes",
        "  version 6: eval - (0-100 %) of 64 held-out episodes",
    ]
    console.summary(tmp_path)
    assert "eval: version 4 43 % (33-54 %), version 6 - (0-100 %)" in capsys.readouterr().out
