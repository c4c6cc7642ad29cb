import asyncio
import io
import json
import shlex
import time
from pathlib import Path
from typing import Any

import pytest
import rich.console

from horizonrl.common.config.schema import RunConfig
from horizonrl.common.state import Outcomes, Progress
from horizonrl.common.types import DropReason, Kind, Phase
from horizonrl.ops.cli.parser import parse
from horizonrl.ops.observe.console import COLUMNS, Console, fitting, next_commands, row
from horizonrl.ops.rundir.broker_status import waits
from horizonrl.ops.rundir.files import Files
from horizonrl.ops.rundir.view import RunView
from tests.ops.runs import EVAL, LINE, broker_status, write_log


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    config = RunConfig.load([], [f"--run.root={tmp_path}", "--imitation.steps=0", "--rl.steps=10"])
    (config.run_dir / "logs").mkdir(parents=True)
    return config


def write_lines(config: RunConfig, *lines: dict[str, Any], name: str = "metrics.jsonl") -> None:
    (config.run_dir / name).write_text("".join(json.dumps(line) + "\n" for line in lines))


def live(console: Console, started: dict[str, float], width: int = 80) -> str:
    """Return what a terminal shows below the steps, once files and logs have been read."""

    async def read() -> None:
        await console._tell_steps(0)
        await console._read(started)

    asyncio.run(read())
    out = io.StringIO()
    rich.console.Console(file=out, width=width).print(console.live(started))
    return out.getvalue()


def test_every_column_shows_a_line_of_the_journal_whatever_was_not_measured() -> None:
    assert all(cell(LINE) for cell in COLUMNS.values())


def test_a_step_is_one_line_on_a_terminal_of_80_columns_and_whole_in_a_file() -> None:
    shown = row({name: COLUMNS[name](LINE) for name in fitting(80)})
    assert len(shown) <= 80
    assert {"step", "horizon", "success", "groups", "step s", "wait s"} < set(fitting(80))
    assert fitting(120) == tuple(COLUMNS)


def test_a_long_wait_explains_itself(config: RunConfig) -> None:
    outcomes = {
        Kind.DEMO: Outcomes(trained=8),
        Kind.TRAIN: Outcomes(
            trained=2, dropped={DropReason.ZERO_VARIANCE: 3, DropReason.STALE: 1}, void=1
        ),
        Kind.EVAL: Outcomes(evaluated=4),
    }
    console = Console(config)
    assert console.wait_text() == "the engines are starting"
    progress = Progress(step=2, phase=Phase.RL, phase_step=2, outcomes=outcomes)
    console.broker = broker_status(config, progress, issued=dict.fromkeys(Kind, 9))
    waits, *accounts = console.wait_text().split("; ")[:1] + console.wait_text().split("; ")[-3:]
    assert waits.startswith("the learner waits for groups")
    assert accounts == [
        "demo tickets: 9 issued = 8 trained + 0 dropped + 0 void + 1 outstanding",
        "train tickets: 9 issued = 2 trained + 4 dropped (stale 1, zero_variance 3) + 1 void + 2 outstanding",
        "eval tickets: 9 issued = 4 evaluated + 0 dropped + 0 void + 5 outstanding",
    ]


def test_parts_are_shown_as_starting_until_their_logs_say_that_they_are_up(
    config: RunConfig,
) -> None:
    now = time.time()
    write_log(config, "console", "part_ready", now - 900, part="actor-0", after_s=31.0)
    console = Console(config)
    started = {"learner": now - 12, "actor-0": now - 12}
    assert "starting: learner for 12 s, actor-0 for 12 s of about 31 s" in live(console, started)
    write_log(config, "learner", "service_opened", now - 2)
    assert "starting: actor-0 for 12 s" in live(console, started)
    started["learner"] = now - 1  # again
    assert "starting: learner for 1 s" in live(console, started)


def test_below_the_steps_a_terminal_shows_how_far_who_waits_and_what_broke(
    config: RunConfig,
) -> None:
    now = time.time()
    console = Console(config)
    write_lines(config, *(LINE | {"step": step, "time": now - 5} for step in (1, 2, 3)))
    for ago in (40.0, 20.0):
        write_log(config, "console", "part_ended", now - ago, part="actor-0", code=1, restarts=1)
    (config.run_dir / "logs/actor-0.log").touch()
    console.broker = broker_status(config, Progress(step=3, phase=Phase.RL, phase_step=3))
    shown = live(console, {}, width=120)
    assert "step 3 of 10" in shown
    assert "about 15 s left" in shown
    wanted = config.rl.groups_per_step
    assert f"the learner waits for groups: 0 of {wanted} are in (last step: 5 s ago)" in shown
    assert "actor-0: ended and was started again (2x, last 20 s ago; logs/actor-0.log)" in shown
    assert max(map(len, live(console, {}).splitlines())) <= 80


def test_groups_that_were_dropped_while_the_learner_waits_are_counted(config: RunConfig) -> None:
    console = Console(config)
    write_lines(config, *(LINE | {"step": step, "groups_dropped": 2} for step in (1, 2)))
    dropped = {DropReason.ZERO_VARIANCE: 40, DropReason.STALE: 1}
    outcomes = {
        Kind.TRAIN: Outcomes(trained=16, dropped=dropped),
        Kind.EVAL: Outcomes(dropped=dropped),
    }
    progress = Progress(
        step=2, phase=Phase.RL, phase_step=2, outcomes=outcomes, lowest_unsettled={Kind.TRAIN: 57}
    )
    console.broker = broker_status(config, progress)
    wanted = config.rl.groups_per_step
    assert f"waits for groups: 0 of {wanted} are in, 37 dropped" in live(console, {}, width=120)
    shown = RunView("r", config, config.run_dir, Files.read(config.run_dir), console.broker)
    assert shown.waits()[0] == f"the learner waits for groups: 0 of {wanted} are in, 37 dropped"
    assert waits(console.broker, config)[0] == f"the learner waits for groups: 0 of {wanted} are in"


def test_a_broker_that_does_not_answer_is_told(config: RunConfig) -> None:
    console = Console(config)
    console.broker = broker_status(
        config, Progress(step=3, phase=Phase.RL, phase_step=3), looked_at=time.time() - 40
    )
    assert "the broker has not answered for 40 s" in live(console, {})


def test_a_checkpoint_in_writing_is_shown_beside_the_size_of_the_one_before(
    config: RunConfig,
) -> None:
    for name, size in (("step-000002", 4_000_000), (".incoming-step-000004", 3_000_000)):
        (config.run_dir / "checkpoints" / name).mkdir(parents=True)
        (config.run_dir / "checkpoints" / name / "weights").write_bytes(bytes(size))
    assert "the checkpoint of step 4 is being written: 3 of about 4 MB" in live(Console(config), {})


def test_elsewhere_a_trouble_is_a_line_once(
    config: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    console = Console(config)
    for _ in range(2):
        write_log(config, "actor-0", "group_broken", time.time(), error="no such task")
        live(console, {})
        console._warn()
    shown = capsys.readouterr().out.splitlines()
    expected = f"  actor-0: a group broke and is played again ({config.run_dir}/logs/actor-0.log): no such task"
    assert shown == [expected]


def test_elsewhere_the_header_comes_once_and_a_line_a_step(
    config: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    console = Console(config)
    write_lines(config, *(LINE | {"step": step} for step in range(1, 31)))
    assert asyncio.run(console._tell_steps(0)) == 30
    write_lines(config, *(LINE | {"step": step} for step in range(1, 3)))  # rewound
    assert asyncio.run(console._tell_steps(30)) == 30
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown] == ["step", *map(str, range(1, 31))]


def test_a_run_that_goes_on_is_told_in_a_line_and_its_earlier_steps_are_not_repeated(
    config: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lines(config, LINE | {"step": 4})
    write_lines(config, EVAL, name="evals.jsonl")
    console = Console(config)
    shown = console.skip_earlier()
    write_lines(config, LINE | {"step": 4}, LINE | {"step": 5})
    assert asyncio.run(console._tell_steps(shown)) == 2
    resumed, _, step = capsys.readouterr().out.splitlines()
    assert (
        resumed
        == f"  resumes after step 4; `horizonrl status {config.run_dir}` shows the earlier ones"
    )
    assert step.split()[0] == "5"


def test_an_evaluation_is_told_once_even_if_a_resumed_learner_writes_it_again(
    config: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    console = Console(config)
    for lines in (
        [EVAL],
        [],
        [EVAL, EVAL | {"version": 6, "success_rate": None, "low": 0.0, "high": 1.0}],
    ):
        write_lines(config, *lines, name="evals.jsonl")
        asyncio.run(console._tell_steps(0))
    assert capsys.readouterr().out.splitlines() == [
        "  version 4: eval 43 % (33-54 %) of 64 held-out episodes",
        "  version 6: eval - (0-100 %) of 64 held-out episodes",
    ]
    console.summary(config.run_dir, config.run_dir, "horizonrl train")
    shown = capsys.readouterr().out
    assert "success on held-out tasks: 43 % after 4 RL steps" in shown
    assert "eval: version 6 - (0-100 %)" in shown


def test_partial_credit_is_in_the_last_lines(
    config: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lines(config, *(LINE | {"step": step, "reward_mean": step / 10} for step in range(3, 9)))
    evaluation = EVAL | {"version": 6, "success_rate": 0.0, "return_mean": 0.5}
    write_lines(config, evaluation, name="evals.jsonl")
    Console(config).summary(config.run_dir, config.run_dir, "horizonrl train")
    shown = capsys.readouterr().out
    assert "reward in training: 0.60 over the last 5 RL steps, 0.50 over the first 5" in shown
    assert "success on held-out tasks: 0 % (return 0.50) after" in shown


def test_at_the_end_it_names_the_model_the_report_and_three_commands_that_are_understood(
    config: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lines(config, LINE)
    Console(config).summary(
        config.run_dir / "model", config.run_dir / "report.html", "horizonrl train laptop"
    )
    shown = capsys.readouterr().out
    assert f"report: {config.run_dir}/report.html" in shown
    commands = [
        line.strip()
        for line in shown.partition("What next:")[2].splitlines()
        if "horizonrl" in line
    ]
    parsed = [parse(shlex.split(command)[1:]) for command in commands]
    assert [arguments.command for arguments, _ in parsed] == ["eval", "history", "train"]
    assert parsed[2][1] == ["--rl.steps", "20"]


@pytest.mark.parametrize("given", ["--rl.steps=10", "--rl.steps 10"])
def test_the_command_that_trains_on_sets_the_number_of_steps_once(
    config: RunConfig, given: str
) -> None:
    (_, _, more) = next_commands(
        config, f"horizonrl train laptop {given} --rl.lr 1e-5", config.total_steps
    )
    assert more == f"horizonrl train laptop --rl.lr 1e-5 --rl.steps {2 * config.rl.steps}"


def test_after_a_start_with_fewer_steps_than_taken_the_commands_go_on_from_the_last_one(
    tmp_path: Path,
) -> None:
    config = RunConfig.load([], [f"--run.root={tmp_path / 'my runs'}", "--rl.steps=3"])
    (_, lineage, more) = next_commands(config, "horizonrl train laptop --rl.steps 3", 151)
    assert shlex.split(lineage)[3:] == [str(config.run_dir), "--version", "151"]
    assert more == "horizonrl train laptop --rl.steps 302"
