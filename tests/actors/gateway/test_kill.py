"""An actor that is killed while its programs play: no process and no port is left, and a program that is killed breaks
its episode alone."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from horizonrl.actors.rollout.rollout import Rollout, play
from horizonrl.common.types import Episode, StopReason
from horizonrl.envs import registry
from tests.actors.gateway.served import CHAT, Remembering, gateway_of, ticket
from tests.envs.program.test_process import left

ROOT = Path(__file__).parents[3]
AGENT = ROOT / "tests" / "envs" / "program" / "agent.py"
ACTOR = f"""
import asyncio, sys
sys.path.insert(0, {str(ROOT)!r})
from horizonrl.actors.rollout.rollout import Rollout, play
from horizonrl.envs import registry
from tests.actors.gateway.served import CHAT, Remembering, gateway_of, ticket

async def act():
    async with gateway_of(Remembering(lambda read: "ok")) as served:
        print(served.port, flush=True)
        rollout = Rollout(served.policy, CHAT, None, 5.0, gateway=served)
        options = {{"program": {f"{AGENT}:hang"!r}, "tasks": sys.argv[1]}}
        await asyncio.gather(*(play(lambda: registry.make("program", options), rollout, ticket(), 0) for _ in range(2)))

asyncio.run(act())
"""


@pytest.fixture
def tasks(tmp_path: Path) -> str:
    file = tmp_path / "tasks.jsonl"
    file.write_text(json.dumps({"id": "one", "question": "?", "answer": "ok"}))
    return str(file)


async def programs_of(actor: int, count: int) -> list[psutil.Process]:
    """Wait until an actor's programs run, and return them with their keepers, their template, and its keeper."""
    async with asyncio.timeout(60):
        while len(found := psutil.Process(actor).children(recursive=True)) < 2 * count + 2:
            await asyncio.sleep(0.02)
    return found


@pytest.mark.process
def test_an_actor_that_is_killed_leaves_no_program_and_no_port(tasks: str) -> None:
    actor = subprocess.Popen(
        [sys.executable, "-c", ACTOR, tasks], stdout=subprocess.PIPE, text=True
    )
    try:
        assert actor.stdout is not None
        port = int(actor.stdout.readline())
        kept = asyncio.run(programs_of(actor.pid, count=2))
        socket.create_connection(("127.0.0.1", port)).close()
    finally:
        actor.kill()
        actor.wait()
        if actor.stdout:
            actor.stdout.close()
    assert left([process.pid for process in kept]) == []
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


@pytest.mark.process
@pytest.mark.parametrize("victim", ["keeper", "program"])
def test_a_program_that_is_killed_breaks_its_episode_alone(tasks: str, victim: str) -> None:
    async def scenario() -> Episode:
        async with gateway_of(Remembering(lambda read: "ok")) as served:
            rollout = Rollout(served.policy, CHAT, None, 5.0, gateway=served)
            options = {"program": f"{AGENT}:hang", "tasks": tasks}
            playing = asyncio.create_task(
                play(lambda: registry.make("program", options), rollout, ticket(), 0)
            )
            async with asyncio.timeout(60):
                while not served.metrics.value("gateway_calls_total", reason="answered"):
                    await asyncio.sleep(0.02)
            program = max(
                psutil.Process().children(recursive=True),
                key=lambda process: len(process.parents()),
            )
            keeper = program.parent()
            assert keeper is not None
            os.kill((keeper if victim == "keeper" else program).pid, signal.SIGKILL)
            episode = await playing
            assert left([program.pid]) == []
            return episode

    episode = asyncio.run(scenario())
    assert (episode.stop, episode.valid) == (StopReason.ENV_ERROR, False)
    assert ("signal 9" if victim == "keeper" else "exit code 137") in (episode.error or "")
