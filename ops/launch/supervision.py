"""The parts of `horizonrl train` are started again until the run is over, as long as it comes further."""

import asyncio
import contextlib
from dataclasses import dataclass

from horizonrl.broker.api import Key, Transport
from horizonrl.broker.state import StateStore
from horizonrl.common.errors import BrokerUnreachable, ConfigError, PartGaveUp
from horizonrl.common.processes import Child
from horizonrl.common.restarts import Restarts
from horizonrl.common.state import Progress, end_of_run

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

    @property
    def reached(self) -> tuple[int, int]:
        return self.step, self.settled

    async def is_over(self) -> bool:
        """Return whether the learner has reported the end of the run; False if the broker does not answer in time."""
        with contextlib.suppress(BrokerUnreachable, TimeoutError):
            # The transport repeats an unanswered request for minutes: a dead broker would hold up the restart.
            async with asyncio.timeout(ANSWER_S):
                progress = await StateStore(self.transport).get(Key.PROGRESS)
            if isinstance(progress, Progress):
                self.note(progress)
                return end_of_run(self.total_steps, progress) is not None
        return False

    def note(self, progress: Progress) -> None:
        self.step = max(self.step, progress.step)
        self.settled = max(self.settled, sum(ends.settled for ends in progress.outcomes.values()))


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
        await restarts.wait(code, run.reached)
        await part.start()
