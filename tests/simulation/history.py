"""The history of a simulated run: what took effect at the broker and in the run directory, in order, and by whom."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import xxhash

from horizonrl.broker.api import Key, Message, Stored, Stream
from horizonrl.broker.codec import decode
from horizonrl.broker.memory import MemoryDelivery
from horizonrl.broker.state import RECORDS
from tests.simulation.clock import Life, VirtualLoop


@dataclass(frozen=True, slots=True)
class Event:
    at: float
    role: str
    life: int
    what: str
    """`publish`, `repeat`, `lease`, `acknowledge`, `give_back`, `put` and `purge` at the broker; `commit` and `seal` in
    the run directory; `apply` at an engine; `disturb` and `end` of a life."""
    name: str = ""
    """A subject, a ticket id, a key, a stream, or what disturbs."""
    number: int = 0
    """A sequence, a revision, a step or a number of deliveries."""
    record: Any = None

    def __str__(self) -> str:
        return (
            f"{self.at:10.4f} {self.role}.{self.life} {self.what} {self.name} {self.number or ''}"
        )


@dataclass
class History:
    loop: VirtualLoop
    events: list[Event] = field(default_factory=list)
    digest: Any = field(default_factory=xxhash.xxh3_128)
    """Of every line of the trace."""
    late: int = 0
    """How often an actor has begun without the weights that its ticket names."""
    lines: list[str] | None = None
    """The trace, if it is kept: the events, and what the roles log."""

    def note(
        self, life: Life, what: str, name: str = "", number: int = 0, record: Any = None
    ) -> None:
        event = Event(self.loop.now, life.role, life.number, what, name, number, record)
        self.events.append(event)
        self.tell(str(event))

    def tell(self, line: str) -> None:
        self.digest.update(line.encode())
        if self.lines is not None:
            self.lines.append(line)

    # ---- at the broker

    def publish(
        self, life: Life, subject: str, data: bytes, message_id: str | None, stored: Stored
    ) -> None:
        if stored.duplicate:
            self.note(life, "repeat", subject, stored.sequence, message_id)
        else:
            self.note(life, "publish", subject, stored.sequence, (message_id, data))

    def put(self, life: Life, key: Key, data: bytes, revision: int) -> None:
        self.note(life, "put", key.value, revision, decode(data, RECORDS[key]))

    def purge(
        self,
        life: Life,
        stream: Stream,
        below: int,
        gone: list[Message],
        left: Mapping[int, Message],
    ) -> None:
        self.note(life, "purge", stream.value, below, (gone, dict(left)))

    def lease(self, life: Life, delivery: MemoryDelivery) -> None:
        self.note(life, "lease", ticket_id(delivery.message), delivery.deliveries)

    def acknowledge(self, life: Life, message: Message) -> None:
        self.note(life, "acknowledge", ticket_id(message), message.sequence)

    def give_back(self, life: Life, message: Message, deliveries: int) -> None:
        self.note(life, "give_back", ticket_id(message), deliveries)

    def restored(self) -> None:
        self.events.append(Event(self.loop.now, "host", 0, "disturb", "restore"))


def ticket_id(message: Message) -> str:
    """Return the ticket that a message of the ticket stream is a copy of."""
    return (message.message_id or "").partition(".")[0]
