"""The processes that `horizonrl train` watches over: how each is started, started again, and ended.

A part may die at any moment, so an end is not an error by itself. What counts is whether the run has come further since
the part last died: a run that goes on can be started again for ever, one that stands still fails after MAX_RESTARTS.
"""

import asyncio
import contextlib
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from horizonrl.broker.api import Key, Transport
from horizonrl.broker.state import StateStore
from horizonrl.common.children import bound
from horizonrl.common.errors import BrokerUnreachable, ConfigError, PartGaveUp, RunFailed
from horizonrl.common.logs import get_logger
from horizonrl.common.state import Progress
from horizonrl.ops.rundir.logfiles import last_error, last_lines

log = get_logger()

MAX_RESTARTS = 5
"""Restarts of one part without progress of the run in between, after which the run has failed."""
LONGEST_WAIT_S = 30.0
"""The longest pause before a restart."""
ANSWER_S = 10.0
"""How long the broker may take to say whether a run is over. Without an answer the part is restarted, which is safe."""
KILL_S = 5.0
"""A part that has not ended this long after its own deadline is killed."""


@dataclass
class RunProgress:
    """How far a run has come, according to its broker."""

    transport: Transport
    total_steps: int
    step: int = 0
    settled: int = 0
    """The most ever seen. A resumed learner repeats steps, and repeated steps are not progress."""

    async def is_over(self) -> bool:
        """Return whether the learner has reported the end of the run; False if the broker does not answer in time."""
        with contextlib.suppress(BrokerUnreachable, TimeoutError):
            # The transport repeats an unanswered request for minutes: a dead broker would hold up the restart.
            async with asyncio.timeout(ANSWER_S):
                progress = await StateStore(self.transport).get(Key.PROGRESS)
            if isinstance(progress, Progress):
                self.note(progress)
                # A finished run that was given more steps still says `finished`, until its learner has reported once.
                return progress.finished and progress.step >= self.total_steps
        return False

    def note(self, progress: Progress) -> None:
        self.step = max(self.step, progress.step)
        self.settled = max(self.settled, sum(ends.settled for ends in progress.outcomes.values()))


@dataclass
class Restarts:
    """Counts how often a process was restarted without progress of the run in between."""

    name: str
    log_file: Path
    count: int = 0
    reached: tuple[int, int] | None = None
    """The run's steps and settled tickets when the process last ended."""

    async def wait(self, code: int, run: RunProgress) -> None:
        """Count an end, then wait: 1 s, 2 s, 4 s and so on. Raises RunFailed after MAX_RESTARTS."""
        before, self.reached = self.reached, (run.step, run.settled)
        # Progress since the last end starts the count anew: a part that dies once an hour must not end a run of days.
        self.count = self.count + 1 if self.reached == before else 1
        log.warning("part_ended", part=self.name, code=code, restarts=self.count)
        if self.count > MAX_RESTARTS:
            raise RunFailed(
                f"the {self.name} ended {self.count} times with code {code}; the end of {self.log_file}:\n"
                + last_lines(self.log_file)
            )
        await asyncio.sleep(min(2.0 ** (self.count - 1), LONGEST_WAIT_S))


@dataclass
class SupervisedProcess:
    """A role in a process of its own, which is restarted until the run is over."""

    role: str
    name: str
    recipe: Path
    log_file: Path
    environment: dict[str, str]
    """All variables of the process, not only further ones."""
    stop_within_s: float
    process: asyncio.subprocess.Process | None = None
    started_at: float = 0.0
    """When the process was last started, in seconds since the epoch."""

    def __post_init__(self) -> None:
        self.restarts = Restarts(self.name, self.log_file)

    async def start(self) -> None:
        # Set before the process exists: the console takes a `service_opened` that is older for that of the process
        # before.
        self.started_at = time.time()
        with self.log_file.open("ab") as sink:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "horizonrl.ops.cli.main",
                self.role,
                str(self.recipe),
                stdout=sink,
                stderr=sink,
                stdin=asyncio.subprocess.DEVNULL,
                env=self.environment,
                start_new_session=True,  # Ctrl-C reaches the console alone, which ends the parts
                # The kernel ends the part together with this console, even a killed one: no part outlives its
                # supervisor.
                preexec_fn=bound(),
            )

    async def watch(self, run: RunProgress) -> None:
        """Restart the process whenever it ends, until the run is over.

        Its exit code does not count: the broker says whether the run is over.
        Raises PartGaveUp if the process would end the same way again (code 2), RunFailed after MAX_RESTARTS ends
        without progress of the run.
        """
        while True:
            assert self.process is not None
            code = await self.process.wait()
            # Code 2 is also that of a learner that another one has replaced. Two that were both started again would
            # replace each other for ever (invariants: One learner speaks).
            if code == ConfigError.exit_code:
                raise PartGaveUp(f"the {self.name} cannot go on: {last_error(self.log_file)}")
            if await run.is_over():
                return
            await self.restarts.wait(code, run)
            await self.start()

    async def stop(self) -> None:
        """End the process with SIGTERM, and with SIGKILL once its deadline has passed."""
        if self.process is None or self.process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            # The process may end between the check above and the signal; the same holds for the kill below.
            self.process.send_signal(signal.SIGTERM)
        try:
            # Later than the role's own timer, which logs `stop_overdue` and the stack: SIGKILL would hide what hung.
            await asyncio.wait_for(self.process.wait(), self.stop_within_s + KILL_S)
        except TimeoutError:
            log.warning("part_killed", part=self.name, after_s=self.stop_within_s + KILL_S)
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            await self.process.wait()
