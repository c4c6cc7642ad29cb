"""A whole run on this machine, one process per role: nats-servers, a controller, a learner and two scripted actors.

Place in the flow: `chaos` disturbs this cluster and `soak` watches it. A role that ends is started again,
as an orchestrator would do.
"""

import asyncio
import contextlib
import json
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from horizonrl.broker.nats.connect import connect
from horizonrl.broker.nats.server import EmbeddedServer
from horizonrl.broker.nats.transport import NatsTransport
from horizonrl.common.config.schema import RunConfig
from horizonrl.common.errors import ConfigError, RunFailed
from horizonrl.common.logs import configure_logs, last_lines
from horizonrl.common.processes import detached, horizonrl_command
from tests.faults.servers import Servers, serving
from tests.processes import make_tiny_model_apart

RECIPE = """\
[run]
name = "{name}"
root = "{directory}"
seed = {seed}

[model]
name = "{directory}/model"
max_context_tokens = 256

[[envs]]
id = "parity"

[rollout]
group_size = 4
max_turn_tokens = 8

[horizon]
kind = "staged"
horizons = [{horizons}]
steps_per_stage = 7

[imitation]
steps = 2
groups_per_step = 2

[rl]
steps = 1000000
groups_per_step = 2
max_staleness = 2

[learner]
micro_batch_tokens = 512
checkpoint_every = 2
step_timeout_s = 120

[actor]
engine = "scripted"
slots = 8
kv_cache_mib = 64

[broker]
ack_wait_s = 1.5
"""
HORIZONS = range(2, 258)
"""The horizon grows every `steps_per_stage` (7) steps, and a checkpoint comes every 2: many deaths of the learner roll
the run back over the growth of a horizon."""
CRASH_PAUSE_S = 0.5
WELL = (0, 128 + signal.SIGTERM)
"""Exit codes of a role that has finished, and of one that has ended in order because it was asked to."""
POLL_S = 0.1
LEDGER_TAIL_BYTES = 1 << 16
"""Enough to hold the last line of any ledger of this recipe."""


@dataclass
class RoleProcess:
    """One role as a process. It is started again if it fails or if `end` has ended it."""

    name: str
    command: Sequence[str]
    log_file: Path
    restarts: int = 0
    crashes: list[int] = field(default_factory=list)
    """The exit codes of ends that `end` did not cause."""
    process: asyncio.subprocess.Process | None = None
    _running: asyncio.Event = field(default_factory=asyncio.Event)
    _dead_s: float | None = None
    """How long the role stays dead after a requested end; None if no end was requested."""
    _requested_code: int = 0
    """The exit code of the last requested end."""
    _log_start: int = 0
    _revived: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._revived.set()

    async def run(self) -> None:
        """Keep the process running; return when it ends by itself or after SIGTERM. Cancelling this kills it."""
        try:
            while (code := await self.run_once()) not in WELL or self._dead_s is not None:
                if self._dead_s is None:
                    self.crashes.append(code)
                await asyncio.sleep(CRASH_PAUSE_S if self._dead_s is None else self._dead_s)
                await self._revived.wait()
                self._requested_code, self._dead_s = code, None
                self.restarts += 1
        finally:
            if self.process is not None and self.process.returncode is None:
                self.process.kill()
                await self.process.wait()

    async def run_once(self) -> int:
        """Start the process and return its exit code."""
        with self.log_file.open("ab") as sink:
            # Earlier processes of this role have written `service_opened` to the same file.
            self._log_start = sink.tell()
            self.process = await asyncio.create_subprocess_exec(
                *horizonrl_command(*self.command),
                cwd=self.log_file.parent,
                # The model is tiny and the roles share the cores: more threads each would only get in each other's way.
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                **detached(sink),
            )
        self._running.set()
        code = await self.process.wait()
        self._running.clear()
        return code

    @property
    def serving(self) -> bool:
        """Whether the present process has opened its service, from when on it handles signals."""
        with self.log_file.open("rb") as log:
            log.seek(self._log_start)
            return self._running.is_set() and b"service_opened" in log.read()

    async def end(self, number: signal.Signals, dead_s: float) -> int:
        """End the process with a signal and start it again `dead_s` later; then return the exit code of the first."""
        await self._running.wait()
        # Set before the signal: `run` has to know an end on request from a crash as soon as it sees the exit code.
        self._dead_s = dead_s
        self._running.clear()
        self.signal(number)
        await self._running.wait()
        return self._requested_code

    @contextlib.asynccontextmanager
    async def dead(self, number: signal.Signals) -> AsyncIterator[None]:
        """End the process with a signal; it starts again after the body."""
        await self._running.wait()
        self._revived.clear()
        self._dead_s = 0.0
        self._running.clear()
        self.signal(number)
        assert self.process is not None
        await self.process.wait()
        try:
            yield
        finally:
            self._revived.set()
            await self._running.wait()

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self.process is not None:
                self.process.send_signal(number)


@dataclass
class Cluster:
    directory: Path
    config: RunConfig
    recipe: Path
    url: str
    """The broker's address for the roles."""
    servers: Servers
    transport: NatsTransport
    """The bench's own connection, which bypasses the proxies."""
    roles: dict[str, RoleProcess] = field(default_factory=dict)
    _tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    @property
    def server(self) -> EmbeddedServer:
        """The first server, which is the only one unless `broker.nats.replicas` asks for more."""
        return self.servers.members[0]

    @property
    def actors(self) -> list[RoleProcess]:
        return [role for name, role in self.roles.items() if name.startswith("actor")]

    def start(self, name: str, *overrides: str) -> None:
        """Start a role, such as `learner` or `actor-1`, and keep it running."""
        command = [name.partition("-")[0], str(self.recipe), f"--broker.url={self.url}", *overrides]
        role = RoleProcess(name, command, self.directory / "logs" / f"{name}.log")
        if name in self.roles:
            # A role that is started with other settings is still the same role to the report.
            role.restarts, role.crashes = self.roles[name].restarts, self.roles[name].crashes
        self.roles[name] = role
        self._tasks[name] = asyncio.create_task(role.run())

    async def ended(self, *names: str, timeout_s: float) -> None:
        """Wait until the roles have ended well. Raises RunFailed if they do not in time."""
        done, late = await asyncio.wait([self._tasks[name] for name in names], timeout=timeout_s)
        for task in done:
            task.result()
        if late:
            slow = [name for name in names if self._tasks[name] in late]
            log_file = self.roles[slow[0]].log_file
            raise RunFailed(
                f"{', '.join(slow)} did not end within {timeout_s} s; the end of {log_file}:\n{last_lines(log_file)}"
            )

    async def until(self, what: str, holds: Callable[[], bool], timeout_s: float) -> None:
        """Wait for a condition that has no event. Raises RunFailed if it does not come true in time."""
        if not await self.within(timeout_s, holds):
            raise RunFailed(
                f"{what} did not happen within {timeout_s} s; see {self.directory / 'logs'}"
            )

    async def within(self, timeout_s: float, holds: Callable[[], bool]) -> bool:
        """Return whether a condition came true in time. Raises RunFailed if a role ends meanwhile."""
        deadline = time.monotonic() + timeout_s
        while not holds():
            self.check()
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(POLL_S)
        return True

    def check(self) -> None:
        """Raise RunFailed if a role has ended. None should while the run lasts."""
        for name, task in self._tasks.items():
            if task.done():
                task.result()
                raise RunFailed(
                    f"the {name} ended in the middle of the run; see {self.roles[name].log_file}"
                )

    @property
    def last_step(self) -> int:
        """The last step in the run's ledger."""
        return _last_step(self.config.run_dir)

    @property
    def furthest_step(self) -> int:
        """The last step of any learner, including those that ran on a copy of the run directory.

        Tickets were issued up to that step. A run that ended earlier would leave some of them without an end.
        """
        copies = self.directory.glob(f"second-*/{self.config.run.name}")
        return max(map(_last_step, [self.config.run_dir, *copies]))

    @property
    def rl_step(self) -> int:
        return self.last_step - self.config.imitation.steps

    @property
    def serving(self) -> bool:
        return all(role.serving for role in self.roles.values())

    @property
    def crashes(self) -> int:
        return sum(len(role.crashes) for role in self.roles.values())

    async def close(self) -> None:
        """End every process, including those that a SIGSTOP has stopped."""
        for role in self.roles.values():
            role.signal(signal.SIGCONT)
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)


@contextlib.contextmanager
def workplace(name: str, directory: Path | None) -> Iterator[Path]:
    """Make the bench's directory, by default a temporary one, and log to it.

    Raises ConfigError if the directory is not empty, since a run in it would be resumed.
    """
    place = (directory or Path(tempfile.mkdtemp(prefix=f"horizonrl-{name}-"))).resolve()
    if place.exists() and any(place.iterdir()):
        raise ConfigError(
            f"--directory {place} is not empty: give a new one, or leave it out for a temporary one"
        )
    (place / "logs").mkdir(parents=True, exist_ok=True)
    with (place / "logs" / "bench.log").open("a", encoding="utf-8") as sink:
        configure_logs(run=name, role="bench", stream=sink)
        yield place


@contextlib.asynccontextmanager
async def cluster(
    name: str, directory: Path, seed: int, overrides: Sequence[str], through_proxy: bool = True
) -> AsyncIterator[Cluster]:
    """Make the model and the recipe in `directory`, start every process, and end them all after the body.

    There are as many servers as the run wants replicas of its streams.
    """
    make_tiny_model_apart(directory / "model")
    recipe = directory / "recipe.toml"
    recipe.write_text(
        RECIPE.format(
            name=name, directory=directory, seed=seed, horizons=", ".join(map(str, HORIZONS))
        ),
        encoding="utf-8",
    )
    config = RunConfig.load([recipe], overrides)
    async with serving(config.run_dir / "nats", config.broker.nats.replicas or 1) as servers:
        broker = config.broker.model_copy(update={"url": servers.direct_url})
        transport = await connect(config.run.name, broker)
        url = servers.url if through_proxy else servers.direct_url
        whole = Cluster(directory, config, recipe, url, servers, transport)
        try:
            for role in ("controller", "learner", "actor-0", "actor-1"):
                whole.start(role, *overrides)
            yield whole
        finally:
            await whole.close()
            await transport.close()


def _last_step(run_dir: Path) -> int:
    """Return the step of the ledger's last line. It reads only the file's end, because it is polled every POLL_S."""
    path = run_dir / "ledger.jsonl"
    if not path.exists():
        return 0
    with path.open("rb") as ledger:
        ledger.seek(max(0, path.stat().st_size - LEDGER_TAIL_BYTES))
        lines = ledger.read().splitlines(keepends=True)
    # The learner may be writing the last line, and the tail may begin in the middle of one.
    complete = [line for line in lines if line.startswith(b"{") and line.endswith(b"}\n")]
    return int(json.loads(complete[-1])["step"]) if complete else 0
