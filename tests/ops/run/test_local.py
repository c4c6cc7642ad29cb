import asyncio
import os
import socket
import sys
from pathlib import Path

import pytest
import yaml

from horizonrl.broker.api import Key
from horizonrl.broker.memory import MemoryServer, MemoryTransport
from horizonrl.broker.state import StateStore
from horizonrl.common.config.schema import RunConfig
from horizonrl.common.errors import RunFailed
from horizonrl.common.state import Outcomes, Progress
from horizonrl.common.types import Kind
from horizonrl.ops.cli.main import main
from horizonrl.ops.run import local
from horizonrl.ops.run.directory import only_train, write_config
from horizonrl.ops.run.local import MAX_RESTARTS, Course, Restarts, SupervisedProcess, _parts, earlier_port

LOCAL = Path(__file__).parents[3] / "ops/deploy/prometheus/local.yml"


def parts_of(root: Path, port: int, actors: int) -> list[SupervisedProcess]:
    config = RunConfig.load([], [f"--run.root={root}", f"--metrics.port={port}", f"--actor.count={actors}"])
    return _parts(config, write_config(config))


def port_of(part: SupervisedProcess, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the port that a part's own process reads from its recipe and its environment."""
    with monkeypatch.context() as patch:
        for name, value in part.environment.items():
            patch.setenv(name, value)
        return RunConfig.load([part.recipe]).metrics.port


def test_each_part_of_train_has_a_metrics_port_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = parts_of(tmp_path, 9100, actors=2)
    assert {part.name: port_of(part, monkeypatch) for part in parts} == {
        "learner": 9100,
        "controller": 9101,
        "actor-0": 9102,
        "actor-1": 9103,
    }


def test_without_a_port_each_part_takes_a_free_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {port_of(part, monkeypatch) for part in parts_of(tmp_path, 0, actors=2)} == {0}


def test_the_local_scrape_configuration_names_those_ports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = yaml.safe_load(LOCAL.read_text())["scrape_configs"]
    scraped = {job["job_name"]: job["static_configs"][0]["targets"] for job in jobs}
    parts = parts_of(tmp_path, 9100, actors=1)
    assert scraped == {part.role: [f"127.0.0.1:{port_of(part, monkeypatch)}"] for part in parts}


def test_a_run_that_goes_on_keeps_its_brokers_port_unless_another_program_has_it(tmp_path: Path) -> None:
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
    told = capsys.readouterr().err
    assert f"another `horizonrl train` (process {os.getpid()}) works in {run_dir}" in told
    assert sorted(path.name for path in run_dir.iterdir()) == ["broker.url", "train.lock"]


async def stand(course: Course, progress: Progress) -> None:
    """Let the learner say where the run is."""
    await StateStore(course.transport).put(Key.PROGRESS, progress)


def course_of(total_steps: int) -> Course:
    return Course(MemoryTransport(MemoryServer(), "run"), total_steps)


def test_a_run_is_over_when_its_learner_has_said_so_at_the_last_step() -> None:
    async def scenario() -> None:
        course = course_of(8)
        assert not await course.is_over()
        for step, finished, over in ((8, False, False), (6, True, False), (8, True, True), (9, True, True)):
            await stand(course, Progress(step=step, finished=finished))
            assert await course.is_over() is over, (step, finished)

    asyncio.run(scenario())


def test_deaths_are_counted_since_the_run_last_came_further(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "LONGEST_WAIT_S", 0.0)
    log_file = tmp_path / "learner.log"
    log_file.write_text("why it died")

    async def scenario() -> None:
        course, restarts = course_of(100), Restarts("learner", log_file)
        for step in range(2 * MAX_RESTARTS):
            course.note(Progress(step=step))
            await restarts.wait(1, course)
        for settled in range(2 * MAX_RESTARTS):
            course.note(Progress(step=2, outcomes={Kind.TRAIN: Outcomes(trained=settled)}))
            await restarts.wait(1, course)
        for repeated in range(MAX_RESTARTS - 1):  # what a learner does once more after its death is no progress
            course.note(Progress(step=repeated, outcomes={Kind.TRAIN: Outcomes(trained=repeated)}))
            await restarts.wait(1, course)
        with pytest.raises(RunFailed, match=f"ended {MAX_RESTARTS + 1} times with code 1(.|\n)*why it died"):
            await restarts.wait(1, course)

    asyncio.run(scenario())


@pytest.mark.process
def test_a_part_that_ends_well_before_the_run_is_over_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "LONGEST_WAIT_S", 0.0)
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho started\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    part = SupervisedProcess("actor", "actor-0", tmp_path / "recipe.toml", tmp_path / "actor-0.log", {}, 10.0)

    class EndsAfterThree(Course):
        async def is_over(self) -> bool:
            return part.log_file.read_text().count("started") == 3

    async def scenario() -> None:
        await part.start()
        await part.watch(EndsAfterThree(MemoryTransport(MemoryServer(), "run"), 8))

    asyncio.run(scenario())
    assert part.restarts.count == 2


@pytest.mark.process
def test_a_part_that_would_end_again_in_the_same_way_is_not_started_again(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("")
    part = SupervisedProcess("controller", "controller", recipe, tmp_path / "controller.log", {}, 10.0)

    async def scenario() -> None:
        await part.start()
        await part.watch(course_of(8))

    with pytest.raises(RunFailed, match=r"^the controller cannot go on, error: broker\.url is not set"):
        asyncio.run(scenario())
    assert part.restarts.count == 0
