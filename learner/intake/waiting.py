"""Waiting: groups that have come wait for their step, and a step waits for tickets that no later one may train.

Place in the flow: Group → **Batch**, with `rl.stale = "wait"`. A step that took what comes first would never train on a
task that takes long: its group is stale once `max_staleness` steps of faster ones have passed. So each train ticket has
a deadline, the last version at which its group is not stale. A step takes the groups with the lowest ticket numbers,
and only if the steps after it can still train everything else in time. The credit makes this possible at every step.

The decision follows from the order of the log and the accounts alone. What is held is a part of every commit, by
sequence and ticket, because the log still has the groups themselves.
"""

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from horizonrl.common.config.schedule import RunSchedule
from horizonrl.common.types import Group, Kind, Phase
from horizonrl.learner.intake.accounts import TicketAccounts, TicketNumbers


class Deadline(NamedTuple):
    """Train tickets below a number may have been issued so early that no step after `version`'s may train them."""

    below: int
    version: int


class Awaited(NamedTuple):
    """The ticket that the next step waits for, and the last version that may train it."""

    number: int
    version: int


def waiting_for(
    schedule: RunSchedule, dumped: Mapping[str, Any] | None = None, *, held: bool = True
) -> "Waiting | None":
    """Return what a run waits with, None if it drops. Without `held`, the log is not the one that was read."""
    if schedule.rl.stale == "drop":
        return None
    commit = dumped or {}
    return Waiting(schedule, commit if held else {**commit, "held": ()})


class Waiting:
    """The deadlines of a run's train tickets, and the groups that are held for a later step."""

    def __init__(self, schedule: RunSchedule, dumped: Mapping[str, Any]) -> None:
        self._schedule = schedule
        self._deadlines = [Deadline(*pair) for pair in dumped.get("deadlines", ())]
        self._held: dict[int, tuple[int, Group]] = {}
        """By ticket number, the sequence and the group."""
        self.unread: dict[int, int] = dict(dumped.get("held", ()))
        """Ticket numbers of the groups that the commit held and that have not been read again, by sequence."""
        self.awaited: Awaited | None = None
        """The ticket that the next step waits for although there are groups enough; None if there is none."""

    @property
    def numbers(self) -> list[int]:
        """The numbers of the tickets whose groups are held."""
        return [*self._held, *self.unread.values()]

    def hold(self, sequence: int, group: Group) -> None:
        self._held[group.ticket.number] = sequence, group

    def release(self) -> Sequence[tuple[int, Group]]:
        """Return all that is held, in the order of the log, and hold nothing."""
        released = sorted(self._held.values(), key=itemgetter(0))
        self._held = {}
        return released

    def choose(
        self, version: int, wanted: int, accounts: TicketAccounts, consumed: TicketNumbers
    ) -> Sequence[tuple[int, Group]]:
        """Return the groups that the step at `version` trains, and hold them no longer; nothing if it has to wait.

        `consumed` has the numbers of the train tickets whose end has been read.
        """
        self.awaited = None
        if self.unread or len(self._held) < wanted:
            return []
        chosen = sorted(self._held)[:wanted]
        for below, last in self._deadlines:
            left_over = accounts.unsettled_below(Kind.TRAIN, below) - sum(
                number < below for number in chosen
            )
            # Waiting is no use for what is late already, or once all of them are in. Either needs a loss of the broker
            # or a recipe that was changed: the credit leaves no more than the steps up to `last` can train.
            if (
                version <= last
                and left_over > (last - version) * wanted
                and consumed.missing_below(below)
            ):
                self.awaited = Awaited(consumed.lowest_missing, last)
                return []
        return [self._held.pop(number) for number in chosen]

    def close(self, version: int, accounts: TicketAccounts) -> None:
        """Note the deadline of what was issued up to the end of `version`, before its step is settled."""
        phase, phase_step = self._schedule.phase(version)
        if phase is Phase.RL:
            # The controller issues tickets until so many are outstanding, in the order of their numbers.
            below = accounts.after_unsettled(
                Kind.TRAIN, self._schedule.outstanding_limit(phase, phase_step)
            )
            self._deadlines.append(Deadline(below, self._schedule.trainable_until(version)))

    def dump(self, accounts: TicketAccounts) -> dict[str, Any]:
        """Return what a commit holds, as JSON-able values."""
        # Where every ticket has ended, there is nothing left to wait for.
        self._deadlines = [
            deadline
            for deadline in self._deadlines
            if accounts.unsettled_below(Kind.TRAIN, deadline.below)
        ]
        held = [[sequence, number] for number, (sequence, _) in self._held.items()]
        return {
            "deadlines": [list(deadline) for deadline in self._deadlines],
            "held": sorted([*held, *map(list, self.unread.items())]),
        }
