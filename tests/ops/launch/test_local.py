import asyncio
import os
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from horizonrl.common.config.schema import RunConfig
from horizonrl.common.processes import Child
from horizonrl.learner.controller.curriculum import TaskSource
from horizonrl.ops.cli.main import main
from horizonrl.ops.launch import local
from horizonrl.ops.launch.broker import earlier_port
from horizonrl.ops.launch.gpus import divide
from horizonrl.ops.launch.local import _parts
from horizonrl.ops.rundir.directory import only_train, read_config, write_config
from tests.nvidia import WHOLE, put_nvidia_smi

LOCAL = Path(__file__).parents[3] / "ops/deploy/prometheus/local.yml"


def parts_of(root: Path, port: int, actors: int) -> list[Child]:
    config = RunConfig.load(
        [], [f"--run.root={root}", f"--metrics.port={port}", f"--actor.count={actors}"]
    )
    return _parts(config, write_config(config), divide(config, ()))


def port_of(part: Child, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the port that a part's own process reads from its recipe and its environment."""
    with monkeypatch.context() as patch:
        for name, value in (part.environment or {}).items():
            patch.setenv(name, value)
        return RunConfig.load([Path(part.command[-1])]).metrics.port


def test_each_part_of_train_has_a_metrics_port_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = parts_of(tmp_path, 9100, actors=2)
    assert {part.name: port_of(part, monkeypatch) for part in parts} == {
        "learner": 9100,
        "controller": 9101,
        "actor-0": 9102,
        "actor-1": 9103,
    }


@pytest.mark.parametrize(
    ("listed", "said", "learners"),
    [(WHOLE, ["GPUs: learner 0; actor-0 1"], {"CUDA_VISIBLE_DEVICES": "0"}), ("", [], {})],
    ids=["two gpus", "none"],
)
def test_train_says_how_it_divides_the_gpus_that_the_machine_has(
    listed: str,
    said: list[str],
    learners: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put_nvidia_smi(tmp_path, monkeypatch, listed)
    seen: list[dict[str, str]] = []

    def interrupt(config: RunConfig, recipe: Path, division: Any) -> None:
        seen.append(division.environment("learner"))
        raise InterruptedError

    monkeypatch.setattr(local, "_parts", interrupt)
    lines: list[str] = []
    console: Any = SimpleNamespace(say=lines.append)
    config = RunConfig.load([], [f"--run.root={tmp_path}", "--actor.count=1"])
    with pytest.raises(InterruptedError):
        asyncio.run(local._supervise(config, console, asyncio.Event()))
    assert (lines, seen) == (said, [learners])


def test_without_a_port_each_part_takes_a_free_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {port_of(part, monkeypatch) for part in parts_of(tmp_path, 0, actors=2)} == {0}


def test_no_variable_of_the_console_wins_over_its_command_line_in_a_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\nenv\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    for name in ("HORIZONRL_RL__LR", "horizonrl_metrics__port", "HORIZONRL_BROKER__NATS__PASSWORD"):
        monkeypatch.setenv(name, "1")
    part = parts_of(tmp_path, 9100, actors=0)[0]
    part.log_file.parent.mkdir()

    async def started() -> None:
        await part.start()
        await part.wait()

    asyncio.run(started())
    seen = [
        line
        for line in part.log_file.read_text().splitlines()
        if line.upper().startswith("HORIZONRL_")
    ]
    assert sorted(seen) == ["HORIZONRL_BROKER__NATS__PASSWORD=1", "HORIZONRL_METRICS__PORT=9100"]
    assert "PATH=" in part.log_file.read_text()


def test_a_recorded_config_takes_no_variable_but_the_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = RunConfig.load(
        [], [f"--run.root={tmp_path}", "--rl.steps=5", "--broker.nats.user=me"]
    )
    write_config(recorded)
    for name, value in {
        "HORIZONRL_RL__STEPS": "9",
        "horizonrl_rl": '{"lr": 1}',
        "HORIZONRL_RL_LR": "1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HORIZONRL_BROKER__NATS__PASSWORD", "secret")
    config = read_config(recorded.run_dir, ["--rl.max_staleness=2"])
    assert (config.rl.steps, config.rl.lr, config.rl.max_staleness) == (5, recorded.rl.lr, 2)
    assert config.broker.nats.password is not None
    assert config.broker.nats.password.get_secret_value() == "secret"


def test_the_local_scrape_configuration_names_those_ports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = yaml.safe_load(LOCAL.read_text())["scrape_configs"]
    scraped = {job["job_name"]: job["static_configs"][0]["targets"] for job in jobs}
    parts = parts_of(tmp_path, 9100, actors=1)
    assert scraped == {
        part.name.partition("-")[0]: [f"127.0.0.1:{port_of(part, monkeypatch)}"] for part in parts
    }


def test_a_run_that_goes_on_keeps_its_brokers_port_unless_another_program_has_it(
    tmp_path: Path,
) -> None:
    assert earlier_port(tmp_path) is None
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (tmp_path / "broker.url").write_text(f"nats://127.0.0.1:{port}")
        assert earlier_port(tmp_path) is None
    assert earlier_port(tmp_path) == port


def test_a_second_train_in_a_directory_is_refused_by_the_process_of_the_first_and_leaves_no_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "textcraft"
    asked = ["train", f"--run.root={tmp_path}", "--envs", '[{"id": "parity"}]']
    with only_train(run_dir):
        (run_dir / "broker.url").write_text("nats://127.0.0.1:9")
        assert main(asked) == 1
    message = capsys.readouterr().err
    assert f"another `horizonrl train` (process {os.getpid()}) works in {run_dir}" in message
    assert sorted(path.name for path in run_dir.iterdir()) == ["broker.url", "train.lock"]


def test_categories_that_an_adaptive_curriculum_cannot_follow_are_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    many = tuple(f"c{place}" for place in range(257))
    monkeypatch.setattr(
        "horizonrl.ops.launch.local.sources_of",
        lambda *_, **__: [TaskSource("parity", many, 1.0, categories=many)],
    )
    asked = [
        "train",
        f"--run.root={tmp_path}",
        "--envs",
        '[{"id": "parity"}]',
        "--curriculum.kind=adaptive",
    ]
    assert main(asked) == 2
    assert "have 257 categories of tasks: it follows at most 256" in capsys.readouterr().err
    assert not list(tmp_path.glob("*/logs"))
