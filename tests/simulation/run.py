"""Simulate one run from its seed, to its end, and say what is wrong with it."""

import asyncio
import gc
import random
import shutil
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import structlog

from horizonrl.common.config.schema import RunConfig
from horizonrl.common.errors import (
    BrokerUnreachable,
    CheckpointMismatch,
    Fenced,
    LogGap,
    StateConflict,
)
from tests.simulation.broker import QuietServer, SimulatedBroker
from tests.simulation.clock import HOST, LIFE, Life, Stuck, VirtualLoop, virtual_time
from tests.simulation.history import History
from tests.simulation.roles import Roles, Tasks
from tests.simulation.storm import BACKGROUND, Profile, Storm, draw_profile
from tests.simulation.verdict import Counts, judge_run

SETTLES_S, DEADLINE_S = 2_000.0, 10_000.0
"""When nothing more goes wrong, and when the run must have ended."""
ROOM_BYTES, PART_BYTES = 30_000, 700
"""Of a small group log, and of a message when groups travel in parts."""
LOGGED = ("ticket", "version", "reason", "step", "awaited", "trainable_until_version")
"""Fields of the roles' logs that the trace has."""
STOP_S = {"learner": 120.0, "controller": 10.0, "actor": 40.0}
"""How long a role may take to end after SIGTERM."""


@dataclass
class Outcome:
    seed: int
    profile: Profile
    findings: list[str]
    digest: str
    """Of the whole trace."""
    callbacks: int = 0
    virtual_s: float = 0.0
    counts: Counts = field(default_factory=Counts)
    lines: list[str] = field(default_factory=list)


def simulate(seed: int, profile: Profile | None = None, *, trace: bool = False) -> Outcome:
    """Run a seed. The same seed has the same trace, callback by callback."""
    profile = profile or draw_profile(seed)
    memory = Path("/dev/shm")
    root = Path(tempfile.mkdtemp(prefix="simulation-", dir=memory if memory.is_dir() else None))
    collects = gc.isenabled()
    # The collector would finish generators at moments that no seed decides.
    gc.disable()
    with warnings.catch_warnings():
        # A coroutine that was handed to a task which was cancelled before it began.
        warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
        try:
            return Simulation(seed, profile, root, trace).outcome()
        finally:
            HOST.tasks.clear()
            gc.collect()
            if collects:
                gc.enable()
            shutil.rmtree(root, ignore_errors=True)


class Simulation:
    def __init__(self, seed: int, profile: Profile, root: Path, trace: bool) -> None:
        self.seed, self.profile, self.root = seed, profile, root
        self.dice = random.Random(f"simulation {seed}")
        self.loop = VirtualLoop(self.dice, DEADLINE_S)
        self.storm = Storm(profile, self.loop, self.dice)
        self.storm.strike = self.strike
        self.history = History(self.loop, lines=[] if trace else None)
        self.lives: list[Life] = []
        self.gone: dict[Life, asyncio.Future[Any]] = {}
        """By life, what its parent waits for."""
        self.replaced: set[Life] = set()
        """Those that another life was started for, while they were asleep."""
        self.disturbed: Counter[str] = Counter()
        self.findings: list[str] = []
        self.backup: dict[str, Any] | None = None
        self.moved, self.judged = 0, False

    def outcome(self) -> Outcome:
        with self._surroundings():
            counts = Counts()
            try:
                counts = self.loop.run_until_complete(self._run())
            except Stuck as error:
                where = ", ".join(str(life) for life in self.lives if life.alive)
                self.findings.append(f"hangs: {error}; still there: {where}")
            with suppress(Stuck):
                self.loop.deadline_s += DEADLINE_S
                self.loop.run_until_complete(self._bury())
            self.loop.close()
        return Outcome(
            self.seed,
            self.profile,
            self.findings,
            self.history.digest.hexdigest(),
            self.loop.callbacks,
            self.loop.now,
            counts,
            self.history.lines or [],
        )

    @contextmanager
    def _surroundings(self) -> Iterator[None]:
        """Let all that the roles ask of the machine come from the loop, and all that they log go to the history."""

        def tell(_: Any, level: str, event: Any) -> Any:
            words = " ".join(f"{name}={event[name]}" for name in LOGGED if name in event)
            line = f"{self.loop.now:10.4f} {LIFE.get()} {level} {event['event']} {words}"
            self.history.tell(line)
            self.history.late += event["event"] == "weights_late"
            raise structlog.DropEvent

        async def in_this_thread(call: Callable[..., Any], *arguments: Any) -> Any:
            await asyncio.sleep(self.loop.thread_s())
            return call(*arguments)

        structlog.configure(processors=[tell], cache_logger_on_first_use=False)
        self.loop.set_exception_handler(self._notice_exception)
        with ExitStack() as stack:
            stack.callback(structlog.reset_defaults)
            stack.enter_context(virtual_time(self.loop))
            agents = "horizonrl.actors.rollout.agents.in_own_thread"
            stack.enter_context(patch(agents, in_this_thread))
            # It counts the passes of one loop, which here are those of several processes.
            fair = "horizonrl.actors.rollout.rollout.turn"
            stack.enter_context(patch(fair, lambda: asyncio.sleep(0)))
            stack.enter_context(patch("horizonrl.learner.main.machine", lambda _: {}))
            yield

    def _notice_exception(self, _: Any, context: dict[str, Any]) -> None:
        life = LIFE.get()
        if self.judged and "exception" not in context:  # a task of what is being buried
            return
        if not any(other.dead for other in self.lives) or life is not HOST:
            self.findings.append(f"{life}: {context['message']}: {context.get('exception')!r}")

    def _configure(self) -> RunConfig:
        return RunConfig.load(
            [],
            [
                "--run.name=run",
                f"--run.root={self.root / 'home'}",
                f"--run.seed={self.seed}",
                "--rollout.max_turn_tokens=4",
                "--model.max_context_tokens=64",
                "--horizon.horizons=[2,3]",
                *(
                    []
                    if "--horizon.kind=fixed" in self.profile.overrides
                    else ["--horizon.steps_per_stage=2"]
                ),
                *self.profile.overrides,
            ],
        )

    async def _run(self) -> Counts:
        config = self._configure()
        server = QuietServer(
            ack_wait_s=config.broker.ack_wait_s,
            max_log_bytes=ROOM_BYTES if self.profile.small_log else 4 << 30,
            max_payload_bytes=PART_BYTES if self.profile.parts else 8 << 20,
        )
        self.broker = SimulatedBroker(self.loop, self.storm, self.history, server)
        tasks = Tasks(self.profile, self.dice, self.loop)
        self.roles = Roles(config, self.profile, self.broker, tasks, self.root)
        self.storm.on_host(self.loop.call_later, SETTLES_S, self.storm.settle)
        async with asyncio.TaskGroup() as group:
            for role, program in self.roles.programs().items():
                group.create_task(self._supervise(role, program))
        for life in self.replaced:
            await self._end(life)
        ended_at = self.loop.now
        self.storm.settle()
        self.judged = True
        findings, counts = await judge_run(
            self.roles, self.history, bool(self.disturbed["restore"])
        )
        self.findings += findings
        self.loop.now = max(ended_at, self.loop.now)
        return counts

    # ---- lives

    async def _supervise(
        self, role: str, program: Callable[[Life], Coroutine[Any, Any, None]]
    ) -> None:
        """Start a role again until it has done its work."""
        for number in range(1, 1000):
            # Not all at once, as on several machines.
            await asyncio.sleep(self.dice.uniform(0.0, 3.0))
            life = Life(role, number)
            self.lives.append(life)
            self.gone[life] = gone = self.loop.create_future()
            life.kills.append(lambda gone=gone: gone.done() or gone.set_result("killed"))  # type: ignore[misc]
            life.main = self.loop.begin(life, program(life))
            life.main.add_done_callback(
                lambda task, life=life, gone=gone: self._notice_end(life, task, gone),  # type: ignore[misc]
                context=BACKGROUND.copy(),
            )
            if await gone == "done":
                return
        self.findings.append(f"{role} was started 1000 times")

    def _notice_end(self, life: Life, task: asyncio.Task[None], gone: asyncio.Future[Any]) -> None:
        error = None if task.cancelled() else task.exception()
        if self.judged:  # it is being buried
            return
        for leaf in leaves(error):
            if not self._excused(life, leaf):
                self.findings.append(f"{life} ended with {type(leaf).__name__}: {leaf}")
        self.history.note(life, "end", type(error).__name__ if error else "")
        unfinished = error is not None or life.signalled
        if not gone.done():
            gone.set_result("again" if unfinished else "done")
        for notice in life.kills:
            notice()

    def _excused(self, life: Life, error: BaseException) -> bool:
        """Return whether something that befell the run explains an error: a supervisor starts the role again."""
        if isinstance(error, Fenced):
            # The one that spoke last goes on: that may be the one which was asleep.
            return any(other.role == life.role for other in self.replaced)
        if isinstance(error, LogGap | StateConflict | CheckpointMismatch):
            return bool(self.disturbed["restore"]) or life in self.replaced
        return isinstance(error, BrokerUnreachable) and not self.profile.calm

    async def _end(self, life: Life) -> None:
        """Wait until a life that was replaced has found out, and has ended."""
        while life.alive:
            await asyncio.sleep(1.0)

    async def _bury(self) -> None:
        for life in self.lives:
            self.loop.bury(life)
        mine, everyone = asyncio.current_task(), [*self.lives, HOST]
        while tasks := [
            task for life in everyone for task in life.tasks if task is not mine and not task.done()
        ]:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        for life in self.lives:
            for task in life.tasks:
                task.cancelled() or task.exception()
            life.tasks.clear()
        await self.loop.shutdown_asyncgens()

    # ---- what befalls them

    def strike(self, life: Life) -> None:
        """Let one event befall the run, as `life` is about to go on."""
        if self.profile.stores_back and self.backup is None:
            self.backup = self.broker.saved()
            self.storm.on_host(self.loop.call_later, self.dice.uniform(1.0, 120.0), self._restore)
            return
        event = self.dice.choices(
            ("kill", "stop", "nap", "sleep", "replace", "outage", "blackout"),
            (8, 3, 2, 2, 2, 2, 1),
        )[0]
        if life.role == "learner" and self.profile.moves and not self.moved:
            event = "replace"
        elif life.role == "learner" and event == "replace":
            event = "kill"
        self.disturbed[event] += 1
        self.history.note(life, "disturb", event)
        match event:
            case "kill":
                self.loop.kill(life)
            case "stop":
                life.signalled = True
                life.stopping.set()
                limit_s = STOP_S[life.role.rstrip("0123456789")]
                self.storm.on_host(self.loop.call_later, limit_s, self._overdue, life)
            case "nap":
                life.awake_at = self.loop.now + self.dice.uniform(0.1, 10.0)
            case "sleep":
                life.awake_at = self.loop.now + self.dice.uniform(20.0, 200.0)
            case "replace":
                self._replace(life)
            case "outage":
                outage_s = self.dice.choice([1.0, 10.0, 60.0, 700.0])
                self.broker.fail(self.dice.uniform(0.5, 1.0) * outage_s)
            case "blackout":
                for other in [other for other in self.lives if other.alive]:
                    self.loop.kill(other)

    def _overdue(self, life: Life) -> None:
        if life.alive:
            self.loop.kill(life)

    def _replace(self, life: Life) -> None:
        """Put a life to sleep, and let another one begin, as where its machine is cut off for a while."""
        life.awake_at = self.loop.now + self.dice.uniform(3.0, 60.0)
        self.replaced.add(life)
        if life.role == "learner":
            self.moved += 1
            home = self.root / f"home{self.moved}"
            shutil.copytree(self.roles.config.run_dir.parent, home)
            run = self.roles.config.run.model_copy(update={"root": home})
            self.roles.config = self.roles.config.model_copy(update={"run": run})
        if not self.gone[life].done():
            self.gone[life].set_result("replaced")

    def _restore(self) -> None:
        if self.backup is not None and not self.storm.over:
            self.disturbed["restore"] += 1
            self.history.tell("the store of the broker goes back")
            self.broker.restore(self.backup)


def leaves(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the errors in a group of errors."""
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            yield from leaves(part)
    elif error is not None:
        yield error
