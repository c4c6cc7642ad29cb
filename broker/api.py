"""The broker's seam: what HorizonRL needs of a message system, and nothing more.

`nats_transport.py` keeps it on NATS JetStream, `memory.py` in this process; one contract suite (`tests/contracts/`)
runs against both. Tickets, groups, weights and state are written once, above this seam, and know neither.

Every wait has a deadline; a transport that is cut off waits for its server and raises BrokerUnreachable only when
the deadline of the call has passed.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol


class Stream(StrEnum):
    """The streams of a run; `{run}_{value}` on the server. Their settings are in `streams.py`."""

    TICKETS = "TICKETS"
    GROUPS = "GROUPS"
    WEIGHTS = "WEIGHTS"
    DEAD = "DEAD"


class Key(StrEnum):
    """The keys of the run's state bucket."""

    PROGRESS = "progress"
    POLICY = "policy"
    HORIZON = "horizon"
    RUN = "run"


@dataclass(frozen=True, slots=True)
class Stored:
    """The server's word that a message is stored."""

    sequence: int
    duplicate: bool
    """A message with this id was stored before; `sequence` is that one's."""


@dataclass(frozen=True, slots=True)
class Message:
    subject: str
    """Without the run's prefix: `groups.train`, not `myrun.groups.train`."""
    data: bytes
    sequence: int
    headers: dict[str, str] = field(default_factory=dict)
    stored_at: float | None = field(default=None, compare=False)
    """Seconds since the epoch by the server's clock, where a single message was asked for."""


@dataclass(frozen=True, slots=True)
class Extent:
    """What a stream holds."""

    first_sequence: int
    last_sequence: int
    messages: int
    stored_bytes: int
    limit_bytes: int | None = None
    """What it may hold; None for a stream without a limit."""

    @property
    def full(self) -> bool:
        """Whether another message of the usual size would be refused."""
        usual = self.stored_bytes / max(1, self.messages)
        return self.limit_bytes is not None and self.stored_bytes + usual > self.limit_bytes


@dataclass(frozen=True, slots=True)
class QueueState:
    """Where the ticket queue stands."""

    waiting: int
    """Tickets that no actor holds."""
    leased: int
    """Tickets under a lease, or on their way back from one."""
    floor: int
    """Every ticket message up to this sequence has been acknowledged or purged."""
    idle: int = 0
    """Actors that wait for a ticket now."""


@dataclass(slots=True)
class TransportCounters:
    """What a transport has met since it was opened."""

    reconnects: int = 0
    redelivered: int = 0
    """Leases of tickets that had been delivered before."""
    denied: int = 0
    """Operations that the server refused."""
    full_waits: int = 0
    """Times that a publish found its stream full."""
    dead_letters: int = 0
    """Undecodable messages moved to the stream DEAD."""


class Delivery(Protocol):
    """A message held under a lease. Exactly one of `acknowledge` and `give_back` ends it."""

    message: Message
    deliveries: int
    """1 on the first delivery."""

    async def extend(self) -> None:
        """Hold the lease for another `ack_wait_s`; return when the server has confirmed it."""

    async def acknowledge(self) -> None:
        """End the lease for good; return when the server has confirmed it."""

    async def give_back(self, delay_s: float = 0.0) -> None:
        """End the lease so that another delivery follows after `delay_s`."""


class Reader(Protocol):
    """A stream's messages in order, from one sequence on. Several readers do not disturb one another."""

    async def fetch(self, limit: int, timeout_s: float) -> list[Message]:
        """Return up to `limit` next messages, at least one; an empty list once `timeout_s` has passed without any.

        Raises LogGap when messages that should come next have been purged, or when the stream ends before the place
        that the reader has reached: then it is not the stream that was read before.
        """

    async def close(self) -> None: ...


class Transport(Protocol):
    """One run's connection to its broker."""

    run: str
    max_payload_bytes: int
    ack_wait_s: float
    """A lease that is not extended for so long is given to another actor."""
    counters: TransportCounters

    @property
    def connected(self) -> bool: ...

    @property
    def stalled_s(self) -> float:
        """How long the request that waits longest has been repeated; 0 while the broker does what it is asked."""

    async def publish(
        self,
        subject: str,
        data: bytes,
        *,
        message_id: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> Stored:
        """Store a message and return the server's word; retried under the same id until it is given.

        A full stream is waited for (back-pressure) and counted, without a deadline: nothing may be dropped.
        Raises RecordTooLarge over `max_payload_bytes`, BrokerDenied when the subject is refused.
        """

    async def lease(self, timeout_s: float) -> Delivery | None:
        """Return the next ticket message under a lease, or None once `timeout_s` has passed without one."""

    async def reader(self, stream: Stream, after: int, subject: str | None = None) -> Reader:
        """Read `stream` from the message that follows sequence `after`; `subject` narrows it (`weights.>`)."""

    async def last(self, stream: Stream, subject: str) -> Message | None:
        """Return the newest message of a subject, or None."""

    async def extent(self, stream: Stream) -> Extent: ...

    async def queue(self) -> QueueState: ...

    async def purge(self, stream: Stream, below: int, subject: str | None = None) -> None:
        """Remove the messages with a sequence below `below`."""

    async def put(self, key: Key, data: bytes, after: int | None = None) -> int:
        """Set a key and return its revision.

        With `after`, raises StateConflict unless that is still the key's revision: somebody else has set it since.
        """

    async def get(self, key: Key) -> bytes | None: ...

    async def revision(self, key: Key) -> int:
        """Return the revision at which a key was last set, 0 for one that never was."""

    async def set_at(self, key: Key) -> float | None:
        """Return when a key was last set, in seconds since the epoch by the server's clock."""

    def watch(self, key: Key) -> AsyncIterator[bytes]:
        """Yield the key's present value, if it has one, then each later one; intermediate values may be skipped."""

    async def close(self) -> None: ...
