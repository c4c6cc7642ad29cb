"""A storm that damages a run's data finds a run that does not go on, and one that notices nothing."""

import asyncio
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.faults import damage
from tests.faults.cluster import RoleProcess
from tests.faults.plan import Event, Fault, Target

EVENT = Event(Fault.FOREIGN_FILES, Target.LEARNER, pause_s=0.0, length_s=0.0)


class Deaf(RoleProcess):
    """A learner that names nothing, and removes what it finds in its folders."""

    async def run_once(self) -> int:
        for path in self.log_file.parent.rglob("*step-best*"):
            path.unlink()
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", "import time; time.sleep(60)"
        )
        self._running.set()
        return await self.process.wait()


def storm_on(run_dir: Path, *, goes_on: bool) -> Any:
    async def within(*_: Any) -> bool:
        await asyncio.sleep(0)
        return goes_on

    for name in ("episodes", "weights", "checkpoints"):
        (run_dir / name).mkdir()
    log_file = run_dir / "learner.log"
    log_file.write_text("")
    roles = {"learner": Deaf("learner", [], log_file)}
    whole = SimpleNamespace(
        config=SimpleNamespace(run_dir=run_dir), roles=roles, within=within, last_step=7
    )
    return SimpleNamespace(whole=whole, findings=[])


@pytest.mark.parametrize("goes_on", [True, False])
async def test_a_learner_that_stands_still_or_meddles_with_foreign_files_is_found(
    tmp_path: Path, goes_on: bool
) -> None:
    storm = storm_on(tmp_path, goes_on=goes_on)
    learner = storm.whole.roles["learner"]
    running = asyncio.create_task(learner.run())
    for _ in range(2):
        await damage.foreign_files(storm, EVENT, "learner")
    stood = [] if goes_on else ["foreign files: no step after 7 within 300 s"]
    unnoticed = [
        "foreign files: no learner has named them",
        "foreign files: step-best.jsonl went",
    ]
    assert storm.findings == 2 * [*stood, *unnoticed]
    assert (learner.restarts, learner.crashes) == (2, [])
    running.cancel()
    await asyncio.wait([running])


def test_emptied_weights_leave_what_another_event_is_looking_after(tmp_path: Path) -> None:
    async def end(*_: Any) -> None: ...

    storm = storm_on(tmp_path, goes_on=True)
    storm.whole.roles["actor-0"] = SimpleNamespace(end=end)
    for name in ("weights/frame-00000001.safetensors", *damage.FOREIGN):
        (tmp_path / name).write_text("whole")
    asyncio.run(damage.empty_weights(storm, EVENT, "actor-0"))
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["frame-best.safetensors"]
    assert storm.findings == []


async def test_a_role_stays_dead_as_long_as_the_body_lasts(tmp_path: Path) -> None:
    learner = storm_on(tmp_path, goes_on=True).whole.roles["learner"]
    running = asyncio.create_task(learner.run())
    for restarts in (1, 2):
        async with learner.dead(signal.SIGKILL):
            dead = learner.process
            await asyncio.sleep(0.05)
            assert learner.process is dead and dead.returncode == -signal.SIGKILL
        assert learner.restarts == restarts and learner.process is not dead
    running.cancel()
    await asyncio.wait([running])
