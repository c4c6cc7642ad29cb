"""The audit: which tickets do neither the queue nor the group log account for? (design.md, invariant 1)

A group is stored before its ticket is acknowledged. So a ticket that the queue has let go of and whose end the learner
has not met, although it has read as far as the log went by then, has vanished: the broker has lost one or the other.
Pure logic over what the controller has read; issuing the ticket again is harmless should its group still turn up.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from horizonrl.common.state import Progress
from horizonrl.common.types import Kind


@dataclass
class Audit:
    _suspects: dict[str, int] = field(default_factory=dict)
    """Where the log ended when the ticket was first found gone from the queue; lower if it has lost its end since."""

    def vanished(self, progress: Progress, gone: set[str], log_end: int) -> set[str]:
        """Return the ids in `gone` that the log cannot hold either, and remember the others.

        `gone` are the open tickets that the queue has let go of; `log_end` was read after them.
        """
        self._suspects = {ticket: min(self._suspects.get(ticket, log_end), log_end) for ticket in gone}
        return {ticket for ticket, end in self._suspects.items() if progress.cursor >= end}


def open_tickets(progress: Progress, issued: Mapping[Kind, int]) -> dict[str, tuple[Kind, int]]:
    """Return kind and number of every issued ticket whose end the learner has not met, by id."""
    return {
        f"{kind.value}-{number:08d}": (kind, number)
        for kind, count in issued.items()
        for number in range(progress.lowest_unsettled.get(kind, 0), count)
        if not progress.ended(kind, number)
    }
