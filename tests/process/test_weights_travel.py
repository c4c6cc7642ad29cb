"""Weights through the broker as changes, between real processes: an actor loads what was published, or nothing."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from horizonrl.broker.api import Role
from horizonrl.broker.connect import connected
from horizonrl.broker.nats.server import EmbeddedServer
from horizonrl.common.config.schema import BrokerSection
from horizonrl.common.scratch import shared_scratch
from tests.weights import RandomLearner

pytestmark = pytest.mark.process


class Follower:
    """A process that follows the weights, and what it has printed."""

    def __init__(self, server: EmbeddedServer, run: str, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.output = folder / f"{uuid.uuid4().hex}.out"
        with self.output.open("wb") as sink:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.process.follower", server.url, run, str(folder)],
                stdout=sink,
            )

    @property
    def applied(self) -> list[tuple[str, str]]:
        events = [
            json.loads(line)
            for line in self.output.read_text().split("\n")[:-1]
            if line.startswith("{")
        ]
        return [
            (event["version"], event["digest"])
            for event in events
            if event["event"] == "weights_loaded"
        ]

    async def reaches(self, version: str) -> None:
        await until(lambda: bool(self.applied) and self.applied[-1][0] == version)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


async def until(ready: Callable[[], bool], within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not ready():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


def test_actors_that_join_late_sleep_or_are_killed_in_a_patch_load_what_was_published(
    nats_server: EmbeddedServer, tmp_path: Path
) -> None:
    run, chance = f"travel-{uuid.uuid4().hex[:8]}", random.Random(0)
    followers: list[Follower] = []

    def follower(host: str) -> Follower:
        followers.append(Follower(nats_server, run, tmp_path / host))
        return followers[-1]

    async def scenario() -> None:
        (tmp_path / "third").mkdir()
        # Held here, or the next process would remove what a killed one has left, and begin anew.
        with shared_scratch(run, tmp_path / "third"):
            await travel()

    async def travel() -> None:
        async with connected(run, BrokerSection(url=nats_server.url), Role.CONTROLLER) as transport:
            # 64 MB, so that a patch and its digests take long enough to be hit.
            learner = RandomLearner(
                transport, tmp_path / "weights", shapes={"model.a": (32 << 20,)}
            )
            awake, sleeper, victim = follower("host"), follower("other"), follower("third")
            for each in (awake, sleeper, victim):
                await learner.step(share=0.01)
                await each.reaches(f"v{learner.version}.l0")
            os.kill(sleeper.process.pid, signal.SIGSTOP)
            for number in range(10):
                await learner.step(share=0.01)
                if number % 3 == 0:
                    await asyncio.sleep(chance.random() * 0.15)
                    victim.end()
                    victim = follower("third")  # takes over what the dead one has left
            newest = f"v{learner.version}.l0"
            late = follower("host")  # shares the image of `awake`
            os.kill(sleeper.process.pid, signal.SIGCONT)
            for each in (awake, late, sleeper, victim):
                await each.reaches(newest)
            assert len(sleeper.applied) <= 5, "one load for the ten versions that it slept"
            digests = {str(policy): digest for policy, digest in learner.digests.items()}
            for each in followers:
                assert set(each.applied) <= set(digests.items())

    try:
        asyncio.run(scenario())
    finally:
        for each in followers:
            each.end()
