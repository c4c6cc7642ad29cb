"""The audit: finds tickets that neither the queue nor the group log accounts for (docs/invariants.md: conservation).

A group is stored before its ticket is acknowledged. So once a ticket has left the queue, its end is in the log. If the
learner has read all that the log held by then and has not found it, the ticket has vanished: the broker has lost it or
its end. The audit is pure logic over what the controller has read. To issue a ticket again is harmless, even if its
group still turns up.
"""

from dataclasses import dataclass, field

from horizonrl.common.state import Progress


@dataclass
class Audit:
    _suspects: dict[str, int] = field(default_factory=dict)
    """The log's last sequence when the ticket was first found gone; lower if the log has lost its end since."""

    def vanished(self, progress: Progress, gone: set[str], log_end: int) -> set[str]:
        """Return the ids in `gone` that the log cannot hold either, and remember the others.

        `gone` has the open tickets that have left the queue. `log_end` must have been read after them.
        """
        self._suspects = {
            ticket: min(self._suspects.get(ticket, log_end), log_end) for ticket in gone
        }
        return {ticket for ticket, end in self._suspects.items() if progress.cursor >= end}
