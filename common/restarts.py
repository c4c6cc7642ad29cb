"""When a process that has ended is started again, and when that has no use.

A process may die at any moment, so an end is not an error by itself. What counts is whether there was progress since it
last died: what goes on can be restarted for ever, what stands still fails after MAX_RESTARTS.
"""

import asyncio
from dataclasses import dataclass
from pathlib import Path

from horizonrl.common.errors import RunFailed
from horizonrl.common.logs import get_logger, last_lines

log = get_logger()

MAX_RESTARTS = 5
"""Restarts of one process without progress in between, after which it has failed."""
FIRST_WAIT_S = 1.0
"""The pause before a first restart; each further one without progress takes twice as long."""


@dataclass
class Restarts:
    """Counts how often a process was restarted without progress in between."""

    name: str
    log_file: Path
    count: int = 0
    reached: object = None
    """What the process had reached when it last ended."""

    async def wait(self, code: int, reached: object) -> None:
        """Count an end, then wait. Any change of `reached` is progress. Raises RunFailed after MAX_RESTARTS."""
        before, self.reached = self.reached, reached
        # Progress since the last end starts the count anew: a part that dies once an hour must not end a run of days.
        self.count = self.count + 1 if reached == before else 1
        log.warning("part_ended", part=self.name, code=code, restarts=self.count)
        if self.count > MAX_RESTARTS:
            raise RunFailed(
                f"the {self.name} ended {self.count} times with code {code}; the end of {self.log_file}:\n"
                + last_lines(self.log_file)
            )
        await asyncio.sleep(FIRST_WAIT_S * 2 ** (self.count - 1))
