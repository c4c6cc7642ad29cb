"""The audit: finds tickets that neither the queue nor the group log accounts for (docs/invariants.md: conservation).

A group is stored before its ticket is acknowledged. So once a ticket has left the queue, its end is in the log. If the
learner has read all that the log held by then and has not found it, the ticket has vanished: the broker has lost it or
its end. The audit is pure logic over what the controller has read. To issue a ticket again is harmless, even if its
group still turns up.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from horizonrl.common.state import Progress
from horizonrl.common.types import Kind


@dataclass
class Audit:
    _suspects: dict[str, int] = field(default_factory=dict)
    """The log's last sequence when the ticket was first found gone; lower if the log has lost its end since."""

    def vanished(self, progress: Progress, gone: set[str], log_end: int) -> set[str]:
        """Return the ids in `gone` that the log cannot hold either, and remember the others.

        `gone` has the open tickets that have left the queue. `log_end` must have been read after them.
        """
        self._suspects = {ticket: min(self._suspects.get(ticket, log_end), log_end) for ticket in gone}
        return {ticket for ticket, end in self._suspects.items() if progress.cursor >= end}


def open_tickets(progress: Progress, issued: Mapping[Kind, int]) -> dict[str, tuple[Kind, int]]:
    """Return kind and number, by id, of every issued ticket whose end the learner has not consumed."""
    return {
        f"{kind.value}-{number:08d}": (kind, number)
        for kind, count in issued.items()
        for number in range(progress.lowest_unsettled.get(kind, 0), count)
        if not progress.ended(kind, number)
    }
