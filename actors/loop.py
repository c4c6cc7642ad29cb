"""The actor's loop: lease a ticket, run its group, publish the group, and only then acknowledge the ticket.

A crash between publishing and acknowledging can only repeat, never lose; the repeat is refused by the ticket's id.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from horizonrl.actors.rollout.rollout import Rollout, broken, play
from horizonrl.actors.weights.follower import WeightsFollower
from horizonrl.broker.api import Transport
from horizonrl.broker.groups import GroupLog
from horizonrl.broker.leases import Lease
from horizonrl.broker.tickets import TicketQueue
from horizonrl.common.errors import BrokerError, ConfigError, LeaseLost, RecordTooLarge
from horizonrl.common.lag import LoopLag
from horizonrl.common.logs import get_logger
from horizonrl.common.metrics import Metrics
from horizonrl.common.service import until_stopped
from horizonrl.common.types import Episode, Group, Kind, Provenance, StopReason, Ticket, Void
from horizonrl.envs.api import Environment

log = get_logger()

# The length of one pull from the queue. Without a ticket the loop pulls again, so this bounds nothing else.
LEASE_WAIT_S = 60.0
RETRY_DELAY_S = 2.0
"""Wait before a ticket whose group broke is delivered again: time for the cause to pass."""
# PROTOCOL.md, "Have the weights": begin anyway after 60 s, since the spans say which version sampled each token.
WEIGHTS_WAIT_S = 60.0
TELL_S = 60.0
"""Interval at which an actor logs what it has played."""
UNFIT_LIMIT = 100
"""Number of tickets in a row whose episodes are too long, after which the config is wrong and not the tasks."""


@dataclass(frozen=True, slots=True)
class ActorSettings:
    slots: int
    """Number of episodes at once."""
    group_size: int
    """Slots that must be free before a ticket is leased: the group size of most tickets."""
    max_deliver: int
    drain_s: float
    total_steps: int
    """Optimizer steps of the run, according to this actor's config."""


@dataclass
class ActorLoop:
    settings: ActorSettings
    transport: Transport
    rollouts: Mapping[str, Rollout]
    """One per environment id."""
    make_environment: Callable[[str], Environment]
    follower: WeightsFollower
    provenance: Provenance
    stopping: asyncio.Event
    metrics: Metrics = field(default_factory=Metrics)
    lag: LoopLag = field(default_factory=LoopLag)

    def __post_init__(self) -> None:
        self._tickets = TicketQueue(self.transport)
        self._log = GroupLog(self.transport)
        self._running = 0
        # Slots, not groups, so that small groups fill what a whole group leaves.
        self._free = self.settings.slots
        """Slots that no leased ticket uses. A group that is larger than expected makes it negative."""
        self._freed = asyncio.Event()
        self._unfit_in_a_row = 0

    async def run(self) -> None:
        """Serve tickets until `stopping` is set or the run is finished; then finish its tickets or give them back.

        Takes tickets; gives groups; waits for leases, generations and environments; woken by the broker. A cancelled
        ticket is given back once.
        """
        # One group for all: when the follower or the watch fails, the serving tasks are cancelled and give their
        # tickets back.
        async with asyncio.TaskGroup() as group:
            following = self.follower.run(self.settings.total_steps)
            endless = (following, self._watch_run(), self._tell(), self.lag.watch())
            background = [group.create_task(work) for work in endless]
            serving: set[asyncio.Task[None]] = set()
            while not self.stopping.is_set():
                # Room first, lease second: a ticket that waits here for slots is kept from actors that have some.
                await until_stopped(self._room(), self.stopping)
                if not self.stopping.is_set() and (lease := await self._next_lease()) is not None:
                    # Counted before the task starts: the next pass of this loop must not see these slots as free.
                    self._free -= lease.ticket.group_size
                    serving.add(task := group.create_task(self._serve(lease)))
                    task.add_done_callback(serving.discard)
            log.info("drain_started", deadline_s=self.settings.drain_s)
            late = await self._drain(serving)
            # After the deadline a ticket is given back rather than left to expire: another actor has it at once, and
            # not only after `broker.ack_wait_s`.
            for task in (*late, *background):
                task.cancel()
        log.info("actor_drained", given_back=len(late))

    async def _room(self) -> None:
        """Wait until there are slots for a group of the expected size."""
        while self._free < self.settings.group_size:
            self._freed.clear()
            await self._freed.wait()

    async def _drain(self, serving: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
        """Wait up to `drain_s` for the tickets that are being served; return those that are not finished."""
        # asyncio.wait rejects an empty set.
        return (
            (await asyncio.wait(set(serving), timeout=self.settings.drain_s))[1]
            if serving
            else set()
        )

    async def _watch_run(self) -> None:
        """Set `stopping` when the learner reports that the run is finished."""
        await self.follower.finished.wait()
        log.info("run_finished")
        self.stopping.set()

    async def _tell(self) -> None:
        """Log what has been played, so that the log shows an actor at work. Woken every TELL_S."""
        while True:
            await asyncio.sleep(TELL_S)
            published = sum(
                self.metrics.value("groups_published_total", kind=kind.value) for kind in Kind
            )
            log.info("groups_played", groups=int(published), running=self._running, free=self._free)

    async def _serve(self, lease: Lease) -> None:
        """Serve one ticket, and then free its slots."""
        self.metrics.count("leases_total", kind=lease.ticket.kind.value)
        if lease.deliveries > 1:
            self.metrics.count("leases_repeated_total")
        try:
            await self._settle(lease)
        # No failure of this actor, which goes on: the ticket may be another one's by now.
        except LeaseLost as error:
            self.metrics.count("tickets_given_back_total", reason="lease_lost")
            log.warning("lease_lost", ticket=lease.ticket.ticket_id, reason=str(error))
        finally:
            self._free += lease.ticket.group_size
            self._freed.set()

    async def _next_lease(self) -> Lease | None:
        """Wait for a lease or for `stopping`, whichever comes first; a lease that arrives with it is given back."""
        async with asyncio.TaskGroup() as group:
            lease = group.create_task(self._tickets.lease(LEASE_WAIT_S))
            stop = group.create_task(self.stopping.wait())
            await asyncio.wait({lease, stop}, return_when=asyncio.FIRST_COMPLETED)
            stop.cancel()
            lease.cancel()
        # cancel() does nothing to a task that is done: a lease that has arrived is served, and drained like the others.
        return None if lease.cancelled() else lease.result()

    async def _settle(self, lease: Lease) -> None:
        """End the lease in one of three ways: its group is published, its ticket is void, or it is given back."""
        ticket = lease.ticket
        # Actors enforce the limit, not the server: a server that stops delivering leaves the ticket to nobody (ADR 10).
        if lease.deliveries > self.settings.max_deliver:
            await self._void(
                lease, "max_deliver", f"delivered {lease.deliveries - 1} times without a group"
            )
            return
        try:
            async with lease.held():
                if ticket.kind is not Kind.DEMO:  # an expert needs no weights
                    # No matter the result: spans name the version, and the learner decides (bounded staleness).
                    await self.follower.reached(ticket.issued_at_version, WEIGHTS_WAIT_S)
                futures = self.follower.lost_futures
                group = await self._run_group(ticket, lease.deliveries)
            if futures != self.follower.lost_futures:
                # Its versions have the names of others that are trained now: nobody could tell them apart.
                await self._give_back(lease, "run_restored", 0.0)
                return
            # A baseline needs two valid episodes. With fewer the learner would drop the group; a retry may do better.
            if len(group.valid_episodes) >= min(2, ticket.group_size):
                self._unfit_in_a_row = 0
                # Not `held()`, which may cancel: a finished group is worth publishing however long the broker is away.
                async with lease.kept():
                    # Before the acknowledgement: a crash in between can only repeat it.
                    await self._publish(group)
                    await self._acknowledge(lease)
                return
        # Before BaseException: what may be another actor's by now is not ours to give back.
        except LeaseLost:
            raise
        except RecordTooLarge as error:  # another actor's group would be too large as well
            await self._void_unfit(lease, str(error))
            return
        except BaseException:
            # Drained, or the engine died: either way another actor must have the ticket.
            await self._give_back(lease, "drained" if self.stopping.is_set() else "failed", 0.0)
            raise
        # Only now: one unfit episode does not void a group that has enough others.
        if any(episode.stop is StopReason.UNFIT for episode in group.episodes):
            await self._void_unfit(lease, _first_error(group) or "")
            return
        cause = _first_error(group)
        log.warning("group_broken", ticket=ticket.ticket_id, error=cause)
        env_id = ticket.task.env_id
        if env_id in self.rollouts and self.rollouts[env_id].faults.hopeless:
            await self._give_back(lease, "failed", 0.0)
            raise ConfigError(
                f"no episode of {env_id} went well, and its code fails again and again: {cause}. Mend it "
                f"(`horizonrl envs check {env_id}` tries it), and give the same command again"
            )
        if lease.deliveries >= self.settings.max_deliver:
            reason = f"{lease.deliveries} deliveries made no group; the last one broke: {cause}"
            await self._void(lease, "max_deliver", reason)
            return
        await self._give_back(lease, "broken", RETRY_DELAY_S)

    async def _void(self, lease: Lease, label: str, reason: str) -> None:
        """End a ticket without a group."""
        # The same order as for a group: stored, then acknowledged (the broker remembers).
        async with lease.kept():
            await self._log.publish_void(
                Void(ticket=lease.ticket, reason=reason[:1024], actor=self.provenance.actor)
            )
            await self._acknowledge(lease)
        self.metrics.count("tickets_void_total", reason=label)
        log.warning("ticket_voided", ticket=lease.ticket.ticket_id, reason=reason)

    async def _acknowledge(self, lease: Lease) -> None:
        if not await lease.acknowledge():
            self.metrics.count("tickets_given_back_total", reason="ack_unconfirmed")

    async def _void_unfit(self, lease: Lease, reason: str) -> None:
        """End a ticket that no retry makes fit. Raises ConfigError if nothing fits: the run would never end."""
        await self._void(lease, "unfit", reason)
        self._unfit_in_a_row += 1
        if self._unfit_in_a_row >= UNFIT_LIMIT:
            raise ConfigError(
                f"{UNFIT_LIMIT} tickets in a row did not fit, the last of them because {reason}: raise "
                "model.max_context_tokens or rollout.max_turn_tokens, or choose shorter tasks or demonstrations, or "
                "smaller groups"
            )

    async def _give_back(self, lease: Lease, reason: str, delay_s: float) -> None:
        self.metrics.count("tickets_given_back_total", reason=reason)
        # The lease then expires after ack_wait.
        with contextlib.suppress(TimeoutError, BrokerError):
            # The actor may be ending, so a broker that is away does not hold it up.
            async with asyncio.timeout(5.0):
                await lease.give_back(delay_s)

    async def _run_group(self, ticket: Ticket, deliveries: int) -> Group:
        started_at_ms = time.time_ns() // 1_000_000
        # `play` raises EngineDead and nothing else, so one episode ends the others only if none of them can go on.
        async with asyncio.TaskGroup() as tasks:
            # The name stands in the log if the environment blocks the event loop.
            episodes = [
                tasks.create_task(self._run_episode(ticket, index), name=str(ticket.task))
                for index in range(ticket.group_size)
            ]
        return Group(
            ticket=ticket,
            episodes=tuple(task.result() for task in episodes),
            provenance=self.provenance,
            deliveries=deliveries,
            started_at_ms=started_at_ms,
            finished_at_ms=time.time_ns() // 1_000_000,
            damaged_version=self.follower.damaged,
        )

    async def _run_episode(self, ticket: Ticket, index: int) -> Episode:
        env_id = ticket.task.env_id
        self._count_running(1)
        try:
            episode = await self._play(ticket, index)
        finally:
            self._count_running(-1)
        if episode.valid:
            self.rollouts[env_id].faults.works = True
        self.metrics.count("episodes_total", env=env_id, stop=episode.stop.value)
        self.metrics.count("sampled_tokens_total", episode.generated_tokens, env=env_id)
        self.metrics.observe("episode_turns", len(episode.turns), env=env_id)
        if episode.turns:
            # The ticket's id becomes the exemplar, so that a slow step in a graph leads to its episode.
            turns, ticket_id = len(episode.turns), ticket.ticket_id
            self.metrics.observe(
                "environment_step_seconds", episode.environment_s / turns, ticket_id, env=env_id
            )
            self.metrics.observe("generate_seconds", episode.generate_s / turns, ticket_id)
        return episode

    async def _play(self, ticket: Ticket, index: int) -> Episode:
        env_id = ticket.task.env_id
        if env_id not in self.rollouts:
            env_ids = ", ".join(self.rollouts)
            # Broken, not raised: the ticket goes back to the queue, and another actor may play this environment.
            return broken(
                index,
                f"this actor plays {env_ids}, not {env_id}: start its actors with the run's recipe",
            )
        return await play(
            partial(self.make_environment, env_id), self.rollouts[env_id], ticket, index
        )

    def _count_running(self, change: int) -> None:
        self._running += change
        self.metrics.set("episodes_running", self._running)

    async def _publish(self, group: Group) -> None:
        stored = await self._log.publish(group)
        # A success: the ticket has ended, and this actor acknowledges it too (the broker remembers).
        if stored.duplicate:
            self.metrics.count("groups_refused_total")
            log.info(
                "group_refused",
                ticket=group.ticket.ticket_id,
                reason="delivered by another actor before",
            )
        else:
            self.metrics.count("groups_published_total", kind=group.ticket.kind.value)


def _first_error(group: Group) -> str | None:
    return next((episode.error for episode in group.episodes if episode.error), None)
