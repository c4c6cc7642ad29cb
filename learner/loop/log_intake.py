"""The intake: reads the group log, entry by entry, until the next step's batch is full or the evaluations are in.

Place in the flow: Group → **Batch**. The collector decides what happens to an entry. The intake waits for entries,
tells the controller what they have settled, and notices when none come, when the log is short of space, and when hardly
any group can be trained on.
"""

import time

from horizonrl.broker.api import Stream
from horizonrl.broker.groups import DeadLetter, Entry, LogReader
from horizonrl.common.logs import get_logger
from horizonrl.common.types import Group, Kind, Void
from horizonrl.learner.loop.breaker import Breaker
from horizonrl.learner.loop.log_space import LogSpace
from horizonrl.learner.loop.ports import Ports
from horizonrl.learner.loop.publication import Publication
from horizonrl.learner.loop.state import LearnerState

log = get_logger()

ANNOUNCE_S = 0.1
"""Least time between two announcements of what was consumed for the same step. Each one is a put and costs the
controller an answer, and at 1,000 groups per second nobody needs it a thousand times."""
LOOK_S = 5.0
"""Time without an entry after which the learner checks whether the log has space for one."""
QUIET_S = 60.0
"""Time without an entry after which the learner says what it waits for."""


class LogIntake:
    def __init__(
        self,
        ports: Ports,
        state: LearnerState,
        publication: Publication,
        log_space: LogSpace,
        patience_s: float,
    ) -> None:
        self._ports = ports
        self._state = state
        self._publication = publication
        self._log_space = log_space
        self._patience_s = patience_s
        """Time without an entry after which nobody plays the tickets any more (`learner.step_timeout_s`)."""
        self._breaker = Breaker(state, patience_s)
        self._earlier: int | None = None
        """The last entry of the log when this learner began: how tickets ended before may have been mended since."""
        self.tickets_issued = 0
        """Tickets that had been issued when the last batch was full."""
        self._announced_at = -ANNOUNCE_S
        self._unannounced = False
        """Whether something was consumed since the last announcement."""

    async def fill(self, reader: LogReader) -> None:
        """Consume entries until the batch is full.

        Takes entries of the log. Gives the pending batch, and progress at most every ANNOUNCE_S while it fills. Waits
        for groups; woken by each entry, and by the clock to check for a log that is full or silent. Returns early, with
        groups missing, when the log is short of space and a checkpoint now would free some.
        """
        state = self._state
        if self._earlier is None:
            self._earlier = (await self._ports.transport.extent(Stream.GROUPS)).last_sequence
        last_entry_at = time.monotonic()
        while missing := state.groups_missing:
            entry = await self._next(reader, min(LOOK_S, QUIET_S))
            if entry is None:
                if await self._log_space.is_short(state.last_commit.cursor):
                    return
                if time.monotonic() - last_entry_at >= QUIET_S:
                    log.warning(
                        "groups_awaited",
                        missing=missing,
                        step=state.step,
                        quiet_s=QUIET_S,
                        **state.awaited(),
                    )
                    # The last entry may have been followed by nothing but the parts of a group that was never joined,
                    # which count as ahead: then it has not been announced yet.
                    await self._announce()
                    here = state.groups_held + state.collector.pending.count(state.phase)
                    await self._log_space.check(
                        here, state.groups_at_most, "the next step", reader.largest_bytes
                    )
                    last_entry_at = time.monotonic()
                continue
            last_entry_at = time.monotonic()
            await self._consume(entry)
            self._breaker.look()
        # A full batch is announced at once: its tickets can be replaced while it trains.
        if self._unannounced:
            await self._announce()
        self.tickets_issued = sum([await self._ports.tickets.count_issued(kind) for kind in Kind])

    async def await_evaluations(self, reader: LogReader) -> None:
        """Consume entries until every evaluation has ended, including the one after the last step.

        Takes entries of the log. Gives results of evaluations, and progress. Waits for eval groups; woken by each
        entry, and by the clock. Returns with evaluations missing if no entry comes for long.
        """
        state = self._state
        due = await self._evaluations_due()
        last_entry_at = time.monotonic()
        while (ended := state.collector.accounts.outcomes()[Kind.EVAL].settled) < due:
            entry = await self._next(reader, min(LOOK_S, QUIET_S, self._patience_s))
            if entry is None:
                if await self._log_space.is_short(state.last_commit.cursor):
                    await self._log_space.free(short=True)
                if (waited_s := time.monotonic() - last_entry_at) >= QUIET_S:
                    await self._log_space.check(ended, due, "the evaluations", reader.largest_bytes)
                if waited_s >= self._patience_s:
                    log.warning(
                        "evaluation_given_up", missing=due - ended, waited_s=round(waited_s)
                    )
                    return
                continue
            last_entry_at = time.monotonic()
            await self._consume(entry)
        if self._unannounced:
            await self._announce()

    async def _next(self, reader: LogReader, timeout_s: float) -> Entry | None:
        """Return the next entry, or None if `timeout_s` passes without one; announce on the way what was consumed."""
        if self._unannounced:
            due_s = self._announced_at + ANNOUNCE_S - time.monotonic()
            entry = await reader.next(due_s) if due_s > 0 else None
            if entry is not None:
                return entry
            await self._announce()
        return await reader.next(timeout_s)

    async def _announce(self) -> None:
        # Before the put, so that a slow broker does not make the next one wait for longer.
        self._announced_at, self._unannounced = time.monotonic(), False
        await self._publication.announcer.announce_consumed()

    async def _evaluations_due(self) -> int:
        """Return how many eval tickets the run has in all: whole rounds, of which one judges the last version."""
        schedule, tasks = self._state.schedule, len(self._state.eval_tasks)
        issued = await self._ports.tickets.count_issued(Kind.EVAL)
        if not tasks:
            return issued
        last = await self._ports.tickets.last_issued(Kind.EVAL)
        # Rounded up: a round that has begun is completed, by the next controller if need be.
        rounds = -(-issued // tasks)
        if last is None or last.issued_at_version.version < schedule.total_steps:
            rounds += 1  # the controller has yet to issue it
        return tasks * max(rounds, schedule.eval_rounds)

    async def _consume(self, entry: Entry) -> None:
        """Let the collector settle or admit an entry, count it, and record the evaluation that it ends."""
        collector = self._state.collector
        self._unannounced = True
        collector.pending.holes += entry.holes
        # Counted and announced before the commit.
        if collector.read_again(entry, self._state.position):
            return
        # Without ticket keys anyone can write under any ticket id. A ticket that is issued later must not be ended now.
        if entry.ends is not None and not await self._ports.tickets.was_issued(*entry.ends):
            kind, number = entry.ends
            log.warning("end_of_no_ticket", sequence=entry.sequence, kind=kind.value, number=number)
            self._ports.metrics.count("log_entries_refused_total", reason="never_issued")
            collector.pass_over(entry)
            return
        repeats = collector.pending.repeats
        end = collector.consume(entry, self._state.position)
        if isinstance(entry.record, DeadLetter):
            self._ports.metrics.count("log_entries_refused_total", reason=entry.record.cause)
        elif collector.pending.repeats > repeats:
            self._ports.metrics.count("log_entries_refused_total", reason="repeat")
        elif isinstance(entry.record, (Group, Void)) and entry.sequence > (self._earlier or 0):
            self._breaker.notice(entry.record)
        if end is not None:
            await self._publication.recorder.record_evaluated(end)
        if isinstance(entry.record, Group) and entry.record.damaged_version is not None:
            await self._publication.announcer.repair_weights(entry.record.damaged_version)
