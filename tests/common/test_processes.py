"""A child writes to its log, ends when it is asked to, and is killed when it does not."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest
import uvloop
from structlog.testing import capture_logs

from horizonrl.common.processes import Child, horizonrl_command

pytestmark = pytest.mark.process

PROGRAM = """
import os, signal, sys, time
handlers = {"orderly": lambda *_: sys.exit(7), "deaf": signal.SIG_IGN}
signal.signal(signal.SIGTERM, handlers[sys.argv[1]])
print("ready", os.getsid(0) == os.getpid(), sys.stdin.read() == "", os.environ.get("WORD"), flush=True)
time.sleep(60)
"""


def child(tmp_path: Path, how: str, stop_within_s: float = 20.0) -> Child:
    environment = {**os.environ, "WORD": "given"}
    return Child(
        [sys.executable, "-c", PROGRAM, how], tmp_path / "actor-0.log", stop_within_s, environment
    )


async def ready(started: Child, times: int) -> None:
    while started.log_file.read_text().count("given\n") < times:
        assert started.process is not None
        assert started.process.returncode is None
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_child_has_its_own_session_and_environment_and_appends_to_its_log(
    tmp_path: Path, run: object
) -> None:
    async def scenario() -> None:
        orderly = child(tmp_path, "orderly")
        for times in (1, 2):
            before = orderly.started_at
            await orderly.start()
            assert orderly.started_at > before
            await ready(orderly, times)
            await orderly.stop()
            assert await orderly.wait() == 7

    assert callable(run)
    run(scenario())
    assert (tmp_path / "actor-0.log").read_text() == "ready True True given\n" * 2


def test_a_child_that_ignores_sigterm_is_killed_after_its_time(tmp_path: Path) -> None:
    async def scenario() -> int:
        deaf = child(tmp_path, "deaf", stop_within_s=0.1)
        await deaf.start()
        await ready(deaf, 1)
        await deaf.stop()
        return await deaf.wait()

    with capture_logs() as logs:
        assert asyncio.run(scenario()) == -signal.SIGKILL
    assert [(line["event"], line["part"]) for line in logs] == [("part_killed", "actor-0")]


def test_a_child_that_was_never_started_or_has_ended_is_left_alone(tmp_path: Path) -> None:
    async def scenario() -> int:
        ended = Child(["true"], tmp_path / "log", 0.0)
        await ended.stop()
        await ended.start()
        code = await ended.wait()
        for _ in range(2):
            ended.send(signal.SIGKILL)
            await ended.stop()
        return code

    with capture_logs() as logs:
        assert asyncio.run(scenario()) == 0
    assert logs == []


def test_the_last_error_of_a_role_is_read_off_its_log(tmp_path: Path) -> None:
    async def scenario() -> Child:
        role = Child(
            horizonrl_command("controller", str(tmp_path / "none.toml")),
            tmp_path / "controller.log",
            10.0,
        )
        for _ in range(2):
            await role.start()
            assert await role.wait() == 2
        return role

    role = asyncio.run(scenario())
    assert role.last_error.startswith(f"no recipe at {tmp_path}")
    assert "error:" not in role.last_error
