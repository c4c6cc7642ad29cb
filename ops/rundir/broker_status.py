"""Where a run stands according to its broker: what `horizonrl status` and the console of `train` know besides files.

Everything here comes from the state bucket, the ticket queue and the extents of the streams, which the user `monitor`
may read. Rewards do not: they are inside groups, which only the learner reads.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from horizonrl.broker.api import Extent, Key, QueueState, Stream, Transport
from horizonrl.broker.state import StateStore
from horizonrl.broker.tickets import TicketQueue
from horizonrl.common.config.schema import RunConfig
from horizonrl.common.state import HorizonState, Outcomes, Progress, WeightsManifest, end_of_run
from horizonrl.common.types import Kind
from horizonrl.ops.terminal.figures import count_noun, duration

LONG_S = 30.0
"""Seconds of silence in a step after which a learner may be gone. Only its own machine knows."""
UNREPORTED = "no learner has reported yet: it is loading its model, or none was started"


@dataclass(frozen=True, slots=True)
class BrokerStatus:
    """One look at the broker."""

    progress: Progress | None
    """None: no learner has been here yet."""
    reported_at: float | None
    """When the learner last reported its progress."""
    weights: WeightsManifest | None
    horizons: dict[str, int]
    issued: dict[Kind, int]
    queue: QueueState
    log: Extent
    dead: int
    """Messages that were refused, each stored with its reason."""
    looked_at: float

    @property
    def outcomes(self) -> dict[Kind, Outcomes]:
        return self.progress.outcomes if self.progress else {}

    @property
    def batch(self) -> int:
        """Groups that have come for the next steps: more than one step's if the next one waits for a ticket."""
        if self.progress is None:
            return 0
        kind = self.progress.phase.kind
        # `ended_ranges` counts settled tickets above the lowest unsettled number, and groups that are held or admitted
        # but not yet trained. All below that number are settled, so the difference is those groups.
        ended = sum(last - first + 1 for first, last in self.progress.ended_ranges.get(kind, ()))
        return ended - (self.progress.settled(kind) - self.progress.lowest_unsettled.get(kind, 0))

    @property
    def unread(self) -> int:
        """Messages of the group log that the learner has not read."""
        return max(0, self.log.last_sequence - (self.progress.cursor if self.progress else 0))

    @property
    def silent_s(self) -> float:
        """Seconds since the learner's last report."""
        return self.looked_at - self.reported_at if self.reported_at is not None else 0.0

    def outstanding(self, kind: Kind) -> int:
        return self.issued[kind] - (self.progress.settled(kind) if self.progress else 0)


class Observer:
    """Reads a run's broker and changes nothing in it."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._state = StateStore(transport)
        self._tickets = TicketQueue(transport)

    async def look(self) -> BrokerStatus:
        # Progress before the counts of tickets: issued only grows, so `outstanding` is never negative.
        progress, weights, horizons = [
            await self._state.get(key) for key in (Key.PROGRESS, Key.POLICY, Key.HORIZON)
        ]
        return BrokerStatus(
            progress=progress if isinstance(progress, Progress) else None,
            reported_at=await self._transport.set_at(Key.PROGRESS),
            weights=weights if isinstance(weights, WeightsManifest) else None,
            horizons=dict(horizons.horizons) if isinstance(horizons, HorizonState) else {},
            issued={kind: await self._tickets.count_issued(kind) for kind in Kind},
            queue=await self._transport.queue(),
            log=await self._transport.extent(Stream.GROUPS),
            dead=(await self._transport.extent(Stream.DEAD)).messages,
            looked_at=time.time(),
        )


def waits(
    broker: BrokerStatus | None,
    config: RunConfig | None,
    steps: Sequence[Mapping[str, Any]] | None = None,
) -> list[str]:
    """Say who waits for what. `config`, if known, has the number of groups per step.

    `steps` are the journal's lines: groups dropped beyond theirs belong to the step in the making.
    """
    progress = None if broker is None else broker.progress
    if broker is None or progress is None:
        return [UNREPORTED]
    if progress.finished:
        return [] if end_of_run(config.total_steps if config else 0, progress) else [UNREPORTED]
    return [_learner(broker, progress, config, steps), *_tickets(broker), *_actors(broker)]


def _learner(
    broker: BrokerStatus,
    progress: Progress,
    config: RunConfig | None,
    steps: Sequence[Mapping[str, Any]] | None,
) -> str:
    """Say what the learner does: it trains if its batch is full, else it waits for groups."""
    if config is not None and progress.step >= config.total_steps:
        return f"the learner waits for the end of {count_noun(broker.outstanding(Kind.EVAL), 'evaluation ticket')}"
    if config is None:
        return f"the learner has {count_noun(broker.batch, 'group')} of its next batch"
    wanted = config.groups_per_step(progress.phase)
    if progress.awaited is not None:
        groups = count_noun(broker.batch, "group")
        return f"the learner waits for {progress.awaited}, which no later step may train; it has {groups}"
    if broker.batch >= wanted:
        silence = ""
        if broker.silent_s > LONG_S:
            silence = f", last report {duration(broker.silent_s)} ago"
        return f"the learner trains on {count_noun(wanted, 'group')}{silence}"
    dropped = (
        0 if steps is None else _dropped(progress) - sum(line["groups_dropped"] for line in steps)
    )
    more = f", {dropped} dropped" if dropped > 0 else ""
    return f"the learner waits for groups: {broker.batch} of {wanted} are in{more}"


def _dropped(progress: Progress) -> int:
    """Return the number of dropped groups, without those of evaluations."""
    return sum(
        sum(ends.dropped.values())
        for kind, ends in progress.outcomes.items()
        if kind is not Kind.EVAL
    )


def _tickets(broker: BrokerStatus) -> Sequence[str]:
    queue, sentences = broker.queue, list[str]()
    if queue.waiting and not queue.leased:
        sentences.append(f"no actor holds a ticket; queued: {queue.waiting}")
    elif queue.waiting or queue.leased:
        sentences.append(
            f"actors hold {count_noun(queue.leased, 'ticket')}; queued: {queue.waiting}"
        )
    if broker.unread:
        messages = count_noun(broker.unread, "message")
        sentences.append(f"the learner has yet to read {messages} of the group log")
    return sentences


def _actors(broker: BrokerStatus) -> Sequence[str]:
    sentences = []
    if broker.queue.idle and not broker.queue.waiting:
        actors = count_noun(broker.queue.idle, "actor")
        sentences.append(f"{actors} with free slots: no tickets until the learner's next step")
    if broker.log.full:
        sentences.append(
            "the group log is full: actors wait to publish until the learner has read and saved"
        )
    return sentences
