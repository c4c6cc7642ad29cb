"""When `horizonrl train` starts one of its processes again.

A part may die at any moment, so an end is not an error by itself. What counts is whether the run has come further since
the part last died: a run that goes on can be started again for ever, one that stands still fails after MAX_RESTARTS.
"""

import asyncio
import contextlib
from dataclasses import dataclass
from pathlib import Path

from horizonrl.broker.api import Key, Transport
from horizonrl.broker.state import StateStore
from horizonrl.common.errors import BrokerUnreachable, ConfigError, PartGaveUp, RunFailed
from horizonrl.common.logs import get_logger, last_lines
from horizonrl.common.processes import Child
from horizonrl.common.state import Progress

log = get_logger()

MAX_RESTARTS = 5
"""Restarts of one part without progress of the run in between, after which the run has failed."""
LONGEST_WAIT_S = 30.0
"""The longest pause before a restart."""
ANSWER_S = 10.0
"""How long the broker may take to say whether a run is over. Without an answer the part is restarted, which is safe."""


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


async def keep_running(part: Child, run: RunProgress) -> None:
    """Start a role again whenever it ends, until the run is over.

    Its exit code does not count: the broker says whether the run is over.
    Raises PartGaveUp if the process would end the same way again (code 2), RunFailed after MAX_RESTARTS ends
    without progress of the run.
    """
    restarts = Restarts(part.name, part.log_file)
    while True:
        code = await part.wait()
        # Code 2 is also that of a learner that another one has replaced. Two that were both started again would
        # replace each other for ever (invariants: One learner speaks).
        if code == ConfigError.exit_code:
            raise PartGaveUp(f"the {part.name} cannot go on: {part.last_error}")
        if await run.is_over():
            return
        await restarts.wait(code, run)
        await part.start()
