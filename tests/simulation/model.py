"""A small model of the protocol: whether a recorded history is one that it allows. Pure: events in, findings out.

It knows what each role may do and when (broker/PROTOCOL.md), and nothing of how the roles do it.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from horizonrl.broker.api import Key, Message, Stream
from horizonrl.broker.codec import decode
from horizonrl.common.config.schema import RunConfig
from horizonrl.common.state import Progress, WeightsManifest
from horizonrl.common.types import Group, Kind, Ticket
from tests.simulation.history import Event, ticket_id

REMEMBERS_S = 3_600.0
"""How long a broker recognises a message id."""
NOTICES_S = 120.0
"""How long a controller that was replaced, and is awake, may go on to issue tickets: a look at the key comes first."""
ON_ITS_WAY_S = 60.0
"""How long a ticket may be on its way to the broker."""
AGAIN = ".again-"


def check_history(events: Sequence[Event], schedule: RunConfig, restored: bool) -> list[str]:
    """Return where a history breaks the protocol. `restored`: the broker's store went back, and much is excused."""
    model = Model(schedule, restored)
    findings = [f"{event}: {finding}" for event in events for finding in model.take(event)]
    return findings + list(model.end())


@dataclass
class Model:
    schedule: RunConfig
    restored: bool
    issued: dict[tuple[str, bool], float] = field(default_factory=dict)
    """By ticket, and whether it was issued again, when it was stored last."""
    ended: dict[str, float] = field(default_factory=dict)
    """By ticket, when its end was stored last."""
    leased: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """By ticket, the lives that were given it."""
    progress: Progress = field(default_factory=Progress)
    allowed: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(Kind, 0))
    """By kind, the number below which tickets had credit at some moment."""
    speaker: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """By key, the life that set it last."""
    lineage: int = -1
    commits: set[int] = field(default_factory=lambda: {0})
    weights: dict[tuple[int, int], str] = field(default_factory=dict)
    """By version and lineage, the digest that was announced."""
    published: dict[int, int] = field(default_factory=dict)
    """By life of the learner, the newest version that it announced."""
    needed: int = 0
    """The first entry of the log that the newest checkpoint needs."""
    controller: tuple[int, float] = (0, 0.0)
    """The newest life that took the run over, and when."""
    stopped: set[str] = field(default_factory=set)
    """Lives that were asked to end."""
    woken: dict[str, float] = field(default_factory=dict)

    def take(self, event: Event) -> Iterator[str]:
        rule = getattr(self, f"_{event.what}", None)
        if rule is not None:
            yield from rule(event)

    def end(self) -> Iterator[str]:
        if self.speaker[Key.POLICY] != self.speaker[Key.PROGRESS]:
            yield f"learner.{self.speaker[Key.POLICY]} set the weights last, though another one spoke for the run"

    # ---- tickets

    def _publish(self, event: Event) -> Iterator[str]:
        message_id, data = event.record
        if message_id is None:
            yield f"stores a message of {event.name} without an id, which a repeat would store again"
        elif event.name.startswith("tickets."):
            yield from self._issue(event, decode(data, Ticket), message_id)
        elif event.name.startswith("groups.") and event.name != "groups.part":
            yield from self._end_ticket(event, message_id, data)

    def _issue(self, event: Event, ticket: Ticket, message_id: str) -> Iterator[str]:
        name, again = ticket.ticket_id, AGAIN in (message_id or "")
        stored_before = self.issued.get((name, again))
        self.issued[name, again] = event.at
        newest, since = self.controller
        if (
            event.life < newest
            and event.at - max(since, self.woken.get(event.role, 0.0)) > NOTICES_S
        ):
            yield f"issues {name}, long after controller.{newest} took over"
        if self.restored:
            return
        if again:
            # One that was on its way while the audit looked is played twice, which is recognised.
            if event.at - self.issued.get((name, False), event.at) > ON_ITS_WAY_S:
                yield f"issues {name} again, which the broker had not lost"
        elif stored_before is not None and event.at - stored_before < REMEMBERS_S:
            yield f"issues {name} twice"
        kinds = {Kind.TRAIN} if self.schedule.rl.demos_per_step else {Kind.TRAIN, Kind.DEMO}
        if ticket.kind in kinds and ticket.number >= self.allowed[ticket.kind]:
            yield f"issues {name} without credit, which ended at {self.allowed[ticket.kind]}"

    def _lease(self, event: Event) -> Iterator[str]:
        self.leased[event.name].add(f"{event.role}.{event.life}")
        yield from ()

    def _end_ticket(self, event: Event, message_id: str, data: bytes) -> Iterator[str]:
        name = message_id.partition(".")[0]
        who = f"{event.role}.{event.life}"
        if who not in self.leased[name]:
            yield f"ends {name}, which it was not given"
        before = self.ended.get(name)
        self.ended[name] = event.at
        if before is not None and not self.restored and event.at - before < REMEMBERS_S:
            yield f"ends {name} twice"
        if event.name == "groups.train":
            group = decode(data, Group)
            if len(group.valid_episodes) < min(2, group.ticket.group_size):
                yield f"publishes {name} with too few valid episodes"

    def _acknowledge(self, event: Event) -> Iterator[str]:
        if event.name not in self.ended:
            yield f"acknowledges {event.name} before its end is stored"

    def _give_back(self, event: Event) -> Iterator[str]:
        who = f"{event.role}.{event.life}"
        spent = event.number >= self.schedule.broker.max_deliver
        if spent and event.name.startswith("train") and who not in self.stopped:
            yield f"gives {event.name} back, which has been played often enough"

    # ---- state

    def _put(self, event: Event) -> Iterator[str]:
        key = Key(event.name)
        match key:
            case Key.PROGRESS:
                yield from self._put_progress(event, event.record)
            case Key.POLICY:
                yield from self._put_policy(event, event.record)
            case Key.RUN:
                if event.life > self.controller[0]:
                    self.controller = event.life, event.at
        self.speaker[key] = event.life

    def _put_progress(self, event: Event, record: Progress) -> Iterator[str]:
        speaker, before = self.speaker[Key.PROGRESS], self.progress
        if event.life < speaker:
            yield f"speaks for the run after learner.{speaker}"
        if event.life == speaker and record.policy.lineage == before.policy.lineage:
            for what in ("step", "cursor"):
                if getattr(record, what) < getattr(before, what):
                    yield f"its {what} goes back from {getattr(before, what)} to {getattr(record, what)}"
            for kind in Kind:
                if record.settled(kind) < before.settled(kind):
                    yield f"fewer tickets of {kind} have ended than before"
        if record.policy.lineage != before.policy.lineage or not speaker:
            if record.policy.lineage <= self.lineage and not self.restored:
                yield f"lineage {record.policy.lineage} was in use"
            self.lineage = max(self.lineage, record.policy.lineage)
            silent = event.life not in self.published
            if record.policy.lineage and silent and not self.restored:
                yield f"begins lineage {record.policy.lineage} without its weights"
        if record.step not in self.commits:
            yield f"announces step {record.step}, which is in no ledger"
        announced = self.published.get(event.life, record.step)
        due = record.step > before.step and self.schedule.publishes(record.step)
        if event.life == speaker and due and announced < record.step:
            yield f"announces step {record.step} before its weights"
        self.progress = record
        phase, phase_step = self.schedule.phase(record.step)
        if not record.finished and record.step < self.schedule.total_steps:
            limit = self.schedule.outstanding_limit(phase, phase_step)
            self.allowed[phase.kind] = max(
                self.allowed[phase.kind], record.settled(phase.kind) + limit
            )

    def _put_policy(self, event: Event, record: WeightsManifest) -> Iterator[str]:
        # One that was replaced may have passed its own check before; who replaced it sets the key again (`end`), and is
        # the last to do so.
        if event.life < (successor := self.speaker[Key.POLICY]) and not self.restored:
            yield f"announces weights after learner.{successor} did"
        name = record.policy.version, record.policy.lineage
        if self.weights.setdefault(name, record.digest) != record.digest and not self.restored:
            yield f"announces other weights as {record.policy}"
        if record.policy.version not in self.commits:
            yield f"announces weights of step {record.policy.version}, which is in no ledger"
        self.published[event.life] = record.policy.version

    def _apply(self, event: Event) -> Iterator[str]:
        name = event.record.version, event.record.lineage
        if self.weights.get(name) != event.name and not self.restored:
            yield f"applies weights as {event.record} that were not announced as such"

    # ---- the learner's disk, and what it frees

    def _commit(self, event: Event) -> Iterator[str]:
        self.commits.add(event.number)
        yield from ()

    def _seal(self, event: Event) -> Iterator[str]:
        self.needed = max(self.needed, event.record)
        yield from ()

    def _purge(self, event: Event) -> Iterator[str]:
        gone, left = event.record
        if event.name == Stream.GROUPS and event.number > self.needed:
            yield f"frees the log that the newest checkpoint needs from {self.needed} on"
        if event.name == Stream.TICKETS:
            yield from self._free_tickets(gone, left)

    def _free_tickets(self, gone: Sequence[Message], left: dict[int, Message]) -> Iterator[str]:
        held = {ticket_id(message) for message in left.values()}
        for message in gone:
            name = ticket_id(message)
            if name not in self.ended and name not in held and not self.restored:
                yield f"removes {name}, which has not ended"

    def _disturb(self, event: Event) -> Iterator[str]:
        self.woken[event.role] = event.at + 300.0  # at the latest
        if event.name == "stop":
            self.stopped.add(f"{event.role}.{event.life}")
        yield from ()
