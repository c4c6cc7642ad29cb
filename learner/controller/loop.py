"""The controller: turns the learner's progress into tickets.

It imports no torch, and keeps nothing in memory that the broker does not hold, so it can die at any moment
(docs/invariants.md: conservation, bounded staleness, the broker remembers).

Place in the flow: progress → **Ticket** → actors. The number of tickets issued is read from the ticket stream itself.
A ticket's task is a pure function of its number. Its horizon is a pure function of the learner's progress and the key
`horizon`.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from horizonrl.broker.api import Key, Stream, Transport
from horizonrl.broker.groups import GroupLog
from horizonrl.broker.open_tickets import OpenTickets
from horizonrl.broker.signing import TicketSigner
from horizonrl.broker.state import StateStore
from horizonrl.broker.tickets import TicketQueue
from horizonrl.common.config.schedule import RunSchedule
from horizonrl.common.logs import get_logger
from horizonrl.common.metrics import Metrics
from horizonrl.common.state import (
    CategoryYield,
    HorizonState,
    Outcomes,
    Progress,
    RepeatedTasks,
    RunSettings,
)
from horizonrl.common.types import Kind, Phase, Sampling, Task, Ticket
from horizonrl.learner.controller.audit import Audit
from horizonrl.learner.controller.curriculum import Curriculum, EvalTask
from horizonrl.learner.controller.fence import ControllerFence
from horizonrl.learner.controller.horizon import scheduled_turns

log = get_logger()

REPORT_S = 1.0
"""Least time within a step between two reports: the gauges of queue and log, and the key `horizon`."""


@dataclass
class Controller:
    schedule: RunSchedule
    settings: RunSettings
    """What the run's roles must agree on."""
    transport: Transport
    signer: TicketSigner
    curriculum: Curriculum
    metrics: Metrics
    eval_tasks: Sequence[EvalTask] = ()
    """The tasks of every evaluation round, in order."""

    def __post_init__(self) -> None:
        self._fence = ControllerFence(self.transport, self.settings)
        self._queue = TicketQueue(self.transport, self.signer)
        self._state = StateStore(self.transport)
        self._log = GroupLog(self.transport, self.signer)
        self._open_tickets = OpenTickets(self.transport, self._queue)
        self._audit = Audit()
        self._recorded = HorizonState()
        """The value of the key `horizon`."""
        self._reported_at = -REPORT_S
        self._most_issued = dict.fromkeys(Kind, 0)
        """By kind, the most tickets that were issued at some moment: a broker that loses some undoes no end."""

    async def run(self) -> None:
        """Issue tickets while credit lasts, and vanished tickets again, until the run is finished.

        Raises Fenced if another controller takes the run over.
        """
        self.metrics.set("run_finished", 0)
        # Before the first ticket: actors read what the environments are made with before they play one.
        await self._fence.take_over()
        if isinstance(recorded := await self._state.get(Key.HORIZON), HorizonState):
            self._recorded = recorded
        async with asyncio.TaskGroup() as group:
            auditing = group.create_task(self._audit_queue())
            await self._follow()
            auditing.cancel()

    async def _follow(self) -> None:
        """Answer the learner's progress with tickets.

        Takes progress. Gives tickets and the `horizon` key. Waits for tickets to be settled; woken by each new value of
        the `progress` key. Returns when the run is finished.
        """
        purged_step, began = 0, False
        async for progress in self._state.until_end(Progress, self.schedule.total_steps):
            issued = await self._look(progress) if began else await self._count_issued()
            # On what the stream says, before `with_ended` makes good for tickets that a power cut took from it.
            self._check_conservation(progress, issued)
            # `until_end` decides whether the run is over: it may have been given more steps since.
            if progress.finished:
                continue
            if not began:
                await self._fill_gaps(progress)
                began = True
            # First, so that a controller that dies in between does not let its successor issue a shorter horizon.
            await self._record_horizons(progress)
            issued = await self._issue(progress, with_ended(issued, progress))
            if progress.step > purged_step:
                await self._fence.check()
                await self._open_tickets.purge(progress)
            # Not at every progress, of which there are ten per second: gauges and `status` need it less often.
            if progress.step > purged_step or time.monotonic() - self._reported_at >= REPORT_S:
                await self._report(progress, issued)
            purged_step = progress.step
        self.metrics.set("run_finished", 1)
        log.info("run_finished")

    async def _audit_queue(self) -> None:
        """Issue again the tickets that neither queue nor log accounts for.

        Takes the ticket queue, the log's end and progress. Gives tickets under their own ids, and gauges. Waits for
        nothing; woken by the clock, because nothing announces a loss. Runs until it is cancelled.
        """
        # At once, so that settled tickets can be purged. Not in `_follow`: it takes seconds with 10,000 outstanding.
        if isinstance(progress := await self._state.get(Key.PROGRESS), Progress):
            await self._refresh(progress)
        else:
            await self._open_tickets.refresh(Progress(), {})
        while True:
            await asyncio.sleep(self.transport.ack_wait_s)
            progress = await self._state.get(Key.PROGRESS)
            if isinstance(progress, Progress) and not progress.finished:
                await self._fence.check()
                await self._issue_vanished(progress)
                # Progress stops when nothing moves, and the last report may be older than the last progress.
                await self._report(progress, with_ended(await self._look(progress), progress))

    async def _refresh(self, progress: Progress) -> None:
        kind, issued = progress.phase.kind, with_ended(await self._count_issued(), progress)
        due = issued | {kind: max(self._end_of_credit(progress), progress.reached(kind))}
        await self._open_tickets.refresh(progress, issued, due)

    async def _issue_vanished(self, progress: Progress) -> None:
        await self._refresh(progress)
        # Floor first: a ticket that is acknowledged after this look only seems open for one more round.
        floor = (await self.transport.queue()).floor
        # At or below the floor, a ticket that the stream still holds has been acknowledged.
        gone = {
            f"{kind.value}-{number:08d}": (kind, number)
            for kind, number in self._open_tickets.gone(progress, floor)
        }
        # After the queue: a group is stored before its ticket is acknowledged, so a gone ticket's end lies below.
        log_end = await self._log.end() if gone else 0
        vanished = self._audit.vanished(progress, set(gone), log_end)
        # Names a copy of a ticket that the stream does not hold any more, or never held.
        newest = (await self.transport.extent(Stream.TICKETS)).last_sequence if vanished else 0
        # By number and not by text, as `reissue` wants them.
        for ticket_id in sorted(vanished, key=lambda ticket_id: gone[ticket_id]):
            kind, number = gone[ticket_id]
            held = await self._open_tickets.stored(kind, number)
            earlier, ticket = held or (newest, self._ticket(kind, number, progress))
            stored, subject = await self._queue.reissue(ticket, earlier)
            self._open_tickets.add(ticket, stored.sequence, subject)
            self.metrics.count("tickets_reissued_total", kind=kind.value)
            log.warning("ticket_reissued", ticket=ticket_id, floor=floor, cursor=progress.cursor)

    async def _look(self, progress: Progress) -> dict[Kind, int]:
        """Return how many tickets of each kind were issued, asking only where more have ended than are known of.

        What is known may be too low if another controller has issued tickets: `_issue` asks before it issues.
        """
        issued = {kind: self._queue.known_issued(kind) for kind in Kind}
        ended = {kind: max(progress.reached(kind), progress.settled(kind)) for kind in Kind}
        return (
            issued
            if all(ended[kind] <= issued[kind] for kind in Kind)
            else await self._count_issued()
        )

    async def _count_issued(self) -> dict[Kind, int]:
        return {kind: await self._queue.count_issued(kind) for kind in Kind}

    async def _fill_gaps(self, progress: Progress) -> None:
        """Issue the tickets that the controller before this one left out when it died among several."""
        for kind in Kind:
            for number in self._queue.missing(kind):
                # A purged ticket is missing too, and has ended.
                if progress.tells(kind, number) and not progress.ended(kind, number):
                    await self._issue_numbers(kind, range(number, number + 1), progress)

    async def _issue(self, progress: Progress, issued: dict[Kind, int]) -> dict[Kind, int]:
        """Issue what is due; return how many of each kind have been issued then.

        Evaluations come first and need no credit: they start with the version that they judge.
        """
        kind, before = progress.phase.kind, issued
        while due := await self._evaluations_due(issued[Kind.EVAL], progress.step):
            issued = await self._issue_up_to(Kind.EVAL, issued[Kind.EVAL] + due, progress, issued)
        issued = await self._issue_up_to(kind, self._end_of_credit(progress), progress, issued)
        issued = await self._issue_up_to(Kind.DEMO, self._demos_due(progress), progress, issued)
        for kind in Kind:
            if count := issued[kind] - before[kind]:
                log.info("tickets_issued", kind=kind.value, count=count, step=progress.step)
        return issued

    def _end_of_credit(self, progress: Progress) -> int:
        """Return the number below which the phase's tickets may be issued: the inequality of bounded staleness.

        It holds whatever dies, since credit is kept as tickets by the broker.
        """
        limit = self.schedule.outstanding_limit(progress.phase, progress.phase_step)
        return progress.settled(progress.phase.kind) + limit

    async def _issue_up_to(
        self, kind: Kind, end: int, progress: Progress, issued: dict[Kind, int]
    ) -> dict[Kind, int]:
        """Issue the tickets of a kind below number `end` that have not been issued."""
        if end <= issued[kind]:
            return issued
        # Asked before each issue and never taken from memory: another controller may have come between (the broker
        # remembers).
        start = max(issued[kind], await self._queue.count_issued(kind))
        if start > issued[kind]:
            self._open_tickets.distrust()
        await self._issue_numbers(kind, range(start, end), progress)
        return issued | {kind: max(start, end)}

    async def _issue_numbers(self, kind: Kind, numbers: range, progress: Progress) -> None:
        tickets = [self._ticket(kind, number, progress) for number in numbers]
        await self._fence.check()
        for ticket, stored in zip(tickets, await self._queue.issue_all(tickets), strict=True):
            self._open_tickets.add(ticket, stored.sequence)
            # A duplicate if the stream has the ticket already, from a controller that died.
            self.metrics.count("tickets_issued_total", not stored.duplicate, kind=kind.value)

    async def _evaluations_due(self, number: int, step: int) -> int:
        """Return how many eval tickets from `number` on are due, to the end of their round; 0 if it is not due."""
        if not await self._evaluation_is_due(number, step):
            return 0
        return len(self.eval_tasks) - number % len(self.eval_tasks)

    async def _evaluation_is_due(self, number: int, step: int) -> bool:
        """Return whether the round of eval ticket `number` is due. A fast learner makes a round late, never skipped."""
        if not self.eval_tasks:
            return False
        round_number, index = divmod(number, len(self.eval_tasks))
        if round_number < self.schedule.eval_rounds:
            return self.schedule.eval_step(round_number) <= step
        # A run that was given more steps has spent a round on its former end. Its new end gets one of its own.
        if step < self.schedule.total_steps or index:
            return index > 0
        last = await self._queue.last_issued(Kind.EVAL)
        return last is not None and last.issued_at_version.version < self.schedule.total_steps

    def _demos_due(self, progress: Progress) -> int:
        """Return how many demonstrations may have been issued in total for RL: those of the steps that have credit.

        A demonstration is quick to make. Bound to the steps, demonstrations cannot outnumber the groups of RL.
        """
        if progress.phase is not Phase.RL or not self.schedule.rl.demos_per_step:
            return 0
        ahead = min(
            progress.phase_step + self.schedule.rl.max_staleness + 1, self.schedule.rl.steps
        )
        ends = progress.outcomes.get(Kind.DEMO, Outcomes())
        # A demonstration that ended without being trained is replaced.
        return self.schedule.demos_due(ahead) + ends.settled - ends.trained

    def _ticket(self, kind: Kind, number: int, progress: Progress) -> Ticket:
        train, evaluation = kind is Kind.TRAIN, kind is Kind.EVAL
        yields, repeats = self._trained_announcements(progress) if train else ((), ())
        drawn = (
            (self._eval_task(number), False)
            if evaluation
            else self.curriculum.draw(kind, number, yields, repeats)
        )
        task, repeated = drawn
        rollout, exam = self.schedule.rollout, self.schedule.eval
        horizon = (
            self.horizon(task.env_id, progress, number)
            if train
            else exam.horizon
            if evaluation
            else None
        )
        return Ticket(
            number=number,
            kind=kind,
            task=task,
            # An expert has nothing to be compared with, so a demonstration is a group of one under the last horizon.
            group_size=rollout.group_size if train else exam.samples if evaluation else 1,
            horizon_turns=horizon or max(self.schedule.horizons(task.env_id)),
            announce_horizon=self.schedule.horizon.announce,
            sampling=Sampling(
                temperature=exam.temperature if evaluation else rollout.temperature,
                max_turn_tokens=rollout.max_turn_tokens,
            ),
            issued_at_version=progress.policy,
            repeated=repeated,
        )

    def _trained_announcements(
        self, progress: Progress
    ) -> tuple[Sequence[CategoryYield], Sequence[RepeatedTasks]]:
        """Return what the recipe draws by: the learner before a change of it announced other environments too."""
        if not self.curriculum.adaptive:
            return (), ()
        trained = {
            source.env_id for source in self.curriculum.sources if Kind.TRAIN in source.kinds
        }
        yields = [entry for entry in progress.yields if entry.env_id in trained]
        return yields, [entry for entry in progress.repeats if entry.env_id in trained]

    def _eval_task(self, number: int) -> Task:
        return self.eval_tasks[number % len(self.eval_tasks)].task

    def horizon(self, env_id: str, progress: Progress, number: int | None = None) -> int:
        """Return the horizon, in turns, of train ticket `number`, or the longest that is issued now.

        An adaptive one never shrinks.
        """
        schedule, horizons = self.schedule.horizon, self.schedule.horizons(env_id)
        if schedule.kind == "adaptive":
            grown = [growth.to_turns for growth in progress.growths if growth.env_id == env_id]
            return max(horizons[0], self._recorded.horizons.get(env_id, 0), *grown)
        step = progress.phase_step if progress.phase is Phase.RL else 0
        if number is None and schedule.kind == "shuffled":
            return horizons[-1]
        return scheduled_turns(self.schedule, self.curriculum.seed, env_id, step, number or 0)

    async def _record_horizons(self, progress: Progress) -> None:
        """Set the key before any ticket has a new horizon, so that no later controller issues a shorter one."""
        horizons = {
            source.env_id: self.horizon(source.env_id, progress)
            for source in self.curriculum.sources
        }
        if horizons != self._recorded.horizons:
            await self._fence.check()
            log.info(
                "horizons_changed", before=self._recorded.horizons, now=horizons, step=progress.step
            )
            self._recorded = self._recorded.model_copy(update={"horizons": horizons})
            await self._state.put(Key.HORIZON, self._recorded)

    def _check_conservation(self, progress: Progress, issued: dict[Kind, int]) -> None:
        violations = 0
        for kind in Kind:
            outstanding = issued[kind] - progress.settled(kind)
            self.metrics.set("tickets_outstanding", max(outstanding, 0), kind=kind.value)
            self._most_issued[kind] = max(self._most_issued[kind], issued[kind])
            excess = progress.settled(kind) - self._most_issued[kind]
            if excess > 0:
                violations += excess
                log.error(
                    "conservation_violated",
                    kind=kind.value,
                    issued=issued[kind],
                    settled=progress.settled(kind),
                )
        self.metrics.set("conservation_violations", violations)

    async def _report(self, progress: Progress, issued: dict[Kind, int]) -> None:
        await self._fence.check()
        for env_id, turns in self._recorded.horizons.items():
            self.metrics.set("horizon_turns", turns, env=env_id)
        for line in self.curriculum.explained(*self._trained_announcements(progress)):
            self.metrics.set(
                "curriculum_share", line.share, env=line.env_id, category=line.category
            )
        await self._measure(progress)
        step = progress.phase_step if progress.phase is Phase.RL else 0
        self._recorded = HorizonState(
            phase_step=step, horizons=self._recorded.horizons, tickets_issued=issued
        )
        await self._state.put(Key.HORIZON, self._recorded)
        self._reported_at = time.monotonic()

    async def _measure(self, progress: Progress) -> None:
        """Set the gauges of queue and log."""
        queue, log_extent = await self.transport.queue(), await self.transport.extent(Stream.GROUPS)
        self.metrics.set("tickets_waiting", queue.waiting)
        self.metrics.set("tickets_leased", queue.leased)
        self.metrics.set("groups_waiting", max(log_extent.last_sequence - progress.cursor, 0))


def with_ended(issued: dict[Kind, int], progress: Progress) -> dict[Kind, int]:
    """Count every ended ticket as issued: a power cut may have removed tickets from the end of their stream."""
    return {kind: max(count, progress.reached(kind)) for kind, count in issued.items()}
