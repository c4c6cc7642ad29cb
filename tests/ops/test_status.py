import asyncio
import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from horizonrl.broker.api import Key
from horizonrl.broker.memory import MemoryServer, MemoryTransport
from horizonrl.broker.state import StateStore
from horizonrl.common.config import RunConfig
from horizonrl.common.types import HorizonGrowth, HorizonState, Phase, Progress
from horizonrl.ops.cli import main
from horizonrl.ops.rundir import read_config, read_lines, write_config
from horizonrl.ops.status import add_broker_rows
from tests.ops.test_console import EVAL, LINE


def test_a_run_directory_is_a_recipe_for_the_same_run(tmp_path: Path) -> None:
    config = RunConfig.load([], [f"--run.root={tmp_path}", "--loss.dual_clip=none"])
    write_config(config)
    again = read_config(config.run_dir)
    assert again.rl.max_staleness == config.rl.max_staleness
    assert again.run_dir == config.run_dir


def test_an_option_that_was_turned_off_stays_off_when_the_run_resumes(tmp_path: Path) -> None:
    config = RunConfig.load([], [f"--run.root={tmp_path}", "--loss.dual_clip=none"])
    write_config(config)
    assert read_config(config.run_dir).loss.dual_clip is None


def test_a_line_that_is_still_being_written_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2')
    assert read_lines(path) == [{"step": 1}]


def test_status_shows_a_stopped_run_from_its_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = RunConfig.load([], [f"--run.root={tmp_path}"])
    write_config(config)
    (config.run_dir / "metrics.jsonl").write_text(json.dumps(LINE) + "\n")
    (config.run_dir / "evals.jsonl").write_text(json.dumps(EVAL) + "\n")
    assert main(["status", str(config.run_dir)]) == 0
    shown = capsys.readouterr().out
    assert "3 (rl)" in shown
    assert "50 %" in shown
    assert "43 % (33-54 %) at version 4" in shown


def test_status_tells_the_horizons_and_why_they_last_grew() -> None:
    async def table() -> Table:
        transport, made = MemoryTransport(MemoryServer(), "run"), Table()
        growth = HorizonGrowth(env_id="babyai", phase_step=12, from_turns=5, to_turns=10, reason="40% cut")
        state = StateStore(transport)
        await state.put(Key.PROGRESS, Progress(step=14, phase=Phase.RL, phase_step=14, growths=(growth,)))
        await state.put(Key.HORIZON, HorizonState(horizons={"textcraft": 8, "babyai": 10}))
        await add_broker_rows(made, transport)
        return made

    console = Console(width=200, file=io.StringIO())
    console.print(asyncio.run(table()))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "textcraft 8 turns, babyai 10 turns" in shown
    assert "babyai 5 to 10 turns after 12 RL steps: 40% cut" in shown
