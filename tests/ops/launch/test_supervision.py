import asyncio
from pathlib import Path

import pytest

from horizonrl.broker.api import Key
from horizonrl.broker.memory import MemoryServer, MemoryTransport
from horizonrl.broker.state import StateStore
from horizonrl.common import restarts
from horizonrl.common.errors import PartGaveUp
from horizonrl.common.processes import Child, horizonrl_command
from horizonrl.common.restarts import Restarts
from horizonrl.common.state import Outcomes, Progress
from horizonrl.common.types import Kind
from horizonrl.ops.launch.supervision import RunProgress, keep_running


async def report(run: RunProgress, progress: Progress) -> None:
    """Let the learner say where the run is."""
    await StateStore(run.transport).put(Key.PROGRESS, progress)


def progress_of(total_steps: int) -> RunProgress:
    return RunProgress(MemoryTransport(MemoryServer(), "run"), total_steps)


async def test_a_run_is_over_when_its_learner_has_said_so_at_the_last_step() -> None:
    run = progress_of(8)
    assert not await run.is_over()
    for step, finished, over in (
        (8, False, False),
        (6, True, False),
        (8, True, True),
        (9, True, True),
    ):
        await report(run, Progress(step=step, finished=finished))
        assert await run.is_over() is over, (step, finished)


async def test_deaths_are_counted_since_the_run_last_came_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "FIRST_WAIT_S", 0.0)

    run, counted = progress_of(100), Restarts("learner", tmp_path / "learner.log")
    counts = []
    for progress in (
        Progress(step=1),
        Progress(step=2),
        Progress(step=2, outcomes={Kind.TRAIN: Outcomes(trained=5)}),
        # A resumed learner's repetition.
        Progress(step=1, outcomes={Kind.TRAIN: Outcomes(trained=3)}),
        Progress(step=2, outcomes={Kind.TRAIN: Outcomes(trained=5)}),
        Progress(step=3),
    ):
        run.note(progress)
        await counted.wait(1, run.reached)
        counts.append(counted.count)
    assert counts == [1, 1, 1, 2, 3, 1]


@pytest.mark.process
async def test_a_part_that_ends_well_before_the_run_is_over_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "FIRST_WAIT_S", 0.0)
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho started\n")
    program.chmod(0o700)
    part = Child([str(program)], tmp_path / "actor-0.log", 10.0)

    class EndsAfterThree(RunProgress):
        async def is_over(self) -> bool:
            return part.log_file.read_text().count("started") == 3

    await part.start()
    await keep_running(part, EndsAfterThree(MemoryTransport(MemoryServer(), "run"), 8))
    assert part.log_file.read_text().count("started") == 3


@pytest.mark.process
def test_a_part_that_would_end_again_in_the_same_way_is_not_started_again(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("")
    part = Child(horizonrl_command("controller", str(recipe)), tmp_path / "controller.log", 10.0)

    async def scenario() -> None:
        await part.start()
        await keep_running(part, progress_of(8))

    with pytest.raises(PartGaveUp, match=r"^the controller cannot go on: broker\.url is not set"):
        asyncio.run(scenario())
    assert part.log_file.read_text().count("error: ") == 1
