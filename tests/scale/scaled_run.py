"""The processes of one row: server, controller, learner, light actors; and what is read off them."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from horizonrl.broker.api import Key, Stream, Transport
from horizonrl.broker.connect import connected
from horizonrl.broker.nats.server import EmbeddedServer
from horizonrl.broker.state import StateStore
from horizonrl.common.config.schema import RunConfig
from horizonrl.common.errors import RunFailed
from horizonrl.common.logs import last_lines
from horizonrl.common.processes import detached
from horizonrl.common.state import Progress
from tests.scale.light_actors import READY

ROOT = Path(__file__).parents[2]
RECIPE = """\
[run]
name = "scale"
root = "{directory}"

[model]
name = "{model}"
max_context_tokens = 256

[[envs]]
id = "parity"

[rollout]
group_size = 2
max_turn_tokens = 4

[horizon]
horizons = [4]

[imitation]
steps = 0

[rl]
steps = 1000000
groups_per_step = {groups_per_step}
max_staleness = 2

[broker]
ack_wait_s = 120

[learner]
backend = "hash"
checkpoint_every = 10

[actor]
engine = "scripted"
slots = 2
drain_s = 1
"""
GROUPS_PER_S = 80.0
"""What the actors of a row play together: about half of what two cores carry. With more, a row would measure processes
that are always behind, and no real actor shares its event loop with a thousand others."""
LEAST_GROUPS_PER_STEP = 10
PER_PROCESS = 2_500
"""Light actors of one process."""
START_S = 300.0
"""Limit of a wait, beyond what it must take."""
CONNECTIONS_PER_S = 20
"""Fewer than the slowest machine opens: a limit, no forecast."""
POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class Reading:
    at: float
    step: int
    groups: int
    messages: int
    bytes: int
    cpu_s: dict[str, float]


@dataclass
class ScaledRun:
    """A run whose actors are connected. Its learner has yet to start."""

    recipe: Path
    actors: int
    server: EmbeddedServer
    transport: Transport
    roles: dict[str, list[psutil.Process]] = field(default_factory=dict)
    processes: list[asyncio.subprocess.Process] = field(default_factory=list)

    async def start(self, role: str, *command: str) -> None:
        """Start a process of a role, which logs into a file of its own."""
        number = len(self.roles.setdefault(role, []))
        log_file = self.recipe.parent / f"{role}-{number}.log"
        with log_file.open("wb") as sink:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                *command,
                cwd=ROOT,
                # The model is not computed: more threads would only spin.
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                **detached(sink, signal.SIGKILL),
            )
        self.processes.append(process)
        self.roles[role].append(psutil.Process(process.pid))

    async def start_role(self, role: str) -> None:
        await self.start(
            role,
            "horizonrl.ops.cli.main",
            role,
            str(self.recipe),
            f"--broker.url={self.server.url}",
        )

    async def start_actors(self) -> None:
        """Start the light actors, and wait until each has its connection."""
        play_s = self.actors / GROUPS_PER_S
        full, rest = divmod(self.actors, PER_PROCESS)
        for share in [PER_PROCESS] * full + [rest] * (rest > 0):
            command = ("tests.scale.light_actors", str(self.recipe), str(share), self.server.url)
            await self.start("actors", *command, str(play_s))
        deadline = time.monotonic() + START_S + self.actors / CONNECTIONS_PER_S
        for number in range(len(self.roles["actors"])):
            log_file = self.recipe.parent / f"actors-{number}.log"
            # A log has no event, so this polls.
            while READY not in await asyncio.to_thread(log_file.read_text):
                self._expect(deadline, "the light actors are not connected")
                await asyncio.sleep(POLL_S)

    async def until_idle(self) -> None:
        """Wait until every actor waits for a ticket."""
        deadline = time.monotonic() + START_S
        while (await self.transport.queue()).idle < self.actors:
            self._expect(deadline, f"not all of {self.actors} actors wait for a ticket")
            await asyncio.sleep(POLL_S)

    async def until_step(self, step: int) -> None:
        """Wait for a step, looking seldom enough not to be measured."""
        deadline = time.monotonic() + START_S + 4 * step_s(self.actors)
        while await self.step() < step:
            self._expect(deadline, f"step {step} has not come")
            await asyncio.sleep(POLL_S)

    def _expect(self, deadline: float, what: str) -> None:
        """Raise RunFailed, with the ends of the logs, if it is late or a process has ended."""
        ended = [process.pid for process in self.processes if process.returncode is not None]
        if ended or time.monotonic() > deadline:
            why = f"process {ended[0]} has ended" if ended else "the time is up"
            logs = (
                f"{file.name}:\n{last_lines(file)}"
                for file in sorted(self.recipe.parent.glob("*.log"))
            )
            raise RunFailed("\n".join((f"{what}, and {why}", *logs)))

    async def step(self) -> int:
        progress = await StateStore(self.transport).get(Key.PROGRESS)
        return progress.step if isinstance(progress, Progress) else 0

    async def read(self) -> Reading:
        figures = await self.server.figures()
        return Reading(
            at=time.monotonic(),
            step=await self.step(),
            groups=(await self.transport.extent(Stream.GROUPS)).last_sequence,
            messages=figures["in_msgs"] + figures["out_msgs"],
            bytes=figures["in_bytes"] + figures["out_bytes"],
            cpu_s=self.cpu_s(),
        )

    def cpu_s(self) -> dict[str, float]:
        """Return the CPU time of each role so far."""
        spent = {
            role: [process.cpu_times() for process in processes]
            for role, processes in self.roles.items()
        }
        return {
            role: float(sum(each.user + each.system for each in times))
            for role, times in spent.items()
        }

    def memory_mib(self) -> dict[str, float]:
        """Return the resident memory of each role."""
        return {
            role: round(sum(process.memory_info().rss for process in processes) / 2**20, 1)
            for role, processes in self.roles.items()
        }


@asynccontextmanager
async def running(directory: Path, model: Path, actors: int) -> AsyncIterator[ScaledRun]:
    """Start a run up to its actors, which wait for tickets; end everything after the body."""
    recipe = directory / "recipe.toml"
    async with EmbeddedServer(directory / "nats") as server:
        groups = groups_per_step(actors)
        recipe.write_text(
            RECIPE.format(directory=directory, model=model, groups_per_step=groups),
            encoding="utf-8",
        )
        config = RunConfig.load([recipe], [f"--broker.url={server.url}"])
        async with connected(config.run.name, config.broker) as transport:
            scaled = ScaledRun(
                recipe, actors, server, transport, {"server": [psutil.Process(server.pid)]}
            )
            try:
                await scaled.start_role("controller")
                await scaled.start_actors()
                yield scaled
            finally:
                for process in scaled.processes:
                    with contextlib.suppress(ProcessLookupError):  # it has ended by itself
                        process.kill()
                    await process.wait()


def groups_per_step(actors: int) -> int:
    return max(LEAST_GROUPS_PER_STEP, actors)


def step_s(actors: int) -> float:
    """Return how long a step takes if the machine keeps up."""
    return groups_per_step(actors) / GROUPS_PER_S
