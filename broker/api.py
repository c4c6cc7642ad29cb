"""The broker's seam: what HorizonRL needs of a message system, and nothing more.

`nats/` provides it on NATS JetStream, `memory.py` inside this process, and `connect.py` chooses by the scheme of
`broker.url`. One contract suite (`tests/contracts/`) runs against every transport. Tickets, groups, weights and state
are written once, above this seam, and know none of them.

Every wait has a deadline. A transport that loses its server waits for it, and raises BrokerUnreachable only when the
deadline of the call has passed.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from horizonrl.broker.codec import MAX_RECORD_BYTES
from horizonrl.common.errors import LogGap

DEAD_MESSAGES = 10_000
"""Most messages that DEAD holds: the newest ones."""
DEAD_BYTES = 2 * MAX_RECORD_BYTES
"""Most bytes that DEAD holds. Twice the largest record, so that the newest one is there as a whole."""


class Role(StrEnum):
    """Who opens a transport. A secured broker gives each role only what it needs."""

    CONTROLLER = "controller"
    """Creates the streams; the other roles wait for them."""
    LEARNER = "learner"
    ACTOR = "actor"
    MONITOR = "monitor"
    """Only reads where the run is: `horizonrl status`."""


class Stream(StrEnum):
    """The streams of a run. Subjects of a stream begin with its value in lower case: `groups.train`."""

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
    """The server's confirmation that a message is stored."""

    sequence: int
    duplicate: bool
    """A message with this id was stored before; `sequence` is the sequence of that message."""


@dataclass(frozen=True, slots=True)
class Message:
    subject: str
    """Without the run's prefix: `groups.train`, not `myrun.groups.train`."""
    data: bytes
    sequence: int
    message_id: str | None = None
    """The id that it was published under: a stream stores each id once."""
    headers: dict[str, str] = field(default_factory=dict)
    stored_at: float | None = field(default=None, compare=False)
    """Seconds since the epoch by the server's clock; None where a transport does not know it."""


@dataclass(frozen=True, slots=True)
class Extent:
    """What a stream holds."""

    first_sequence: int
    last_sequence: int
    messages: int
    stored_bytes: int
    limit_bytes: int | None = None
    """Most bytes that it may hold; None for a stream without a limit."""

    @property
    def full(self) -> bool:
        """Whether another message of the usual size would be refused."""
        return self.refuses(0)

    def refuses(self, message_bytes: int) -> bool:
        """Return whether a message of this size, or of the usual size if that is larger, would be refused."""
        # Not the limit itself: a stream is full for its publishers as soon as the next message does not fit.
        usual = self.stored_bytes / max(1, self.messages)
        return (
            self.limit_bytes is not None
            and self.stored_bytes + max(usual, message_bytes) > self.limit_bytes
        )


@dataclass(frozen=True, slots=True)
class QueueState:
    """The state of the ticket queue."""

    waiting: int
    """Tickets that no actor holds."""
    leased: int
    """Tickets under a lease, or given back with a delay that has not passed."""
    floor: int
    """Every ticket message up to this sequence has been acknowledged or purged."""
    idle: int = 0
    """Actors that are waiting for a ticket now."""


@dataclass(slots=True)
class TransportCounters:
    """What has happened to a transport since it was opened."""

    reconnects: int = 0
    redelivered: int = 0
    """Leases of tickets that had been delivered before."""
    denied: int = 0
    """Operations that the server refused."""
    full_waits: int = 0
    """Attempts to publish that found the stream full."""
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
        """End the lease for good; return when the server has confirmed it.

        Raises BrokerUnreachable if it does not within `ack_wait_s`: it may have lost the message.
        """

    async def give_back(self, delay_s: float = 0.0) -> None:
        """End the lease so that another delivery follows after `delay_s`."""


class Reader(Protocol):
    """A stream's messages in order, from a given sequence. Readers do not disturb one another."""

    async def fetch(self, limit: int, timeout_s: float) -> list[Message]:
        """Return the next messages, one at least and `limit` at most; an empty list if `timeout_s` passes without any.

        Raises LogGap if the next messages have been purged, or if the stream ends before the reader's position: then it
        is not the stream that was read before (see `check_gap`).
        """

    async def close(self) -> None: ...


class Transport(Protocol):
    """One run's connection to its broker."""

    run: str
    max_payload_bytes: int
    ack_wait_s: float
    """Seconds after which a lease that was not extended goes to another actor."""
    counters: TransportCounters

    @property
    def connected(self) -> bool: ...

    @property
    def stalled_s(self) -> float:
        """Seconds for which the oldest unanswered request has been repeated; 0 while the broker answers."""

    @property
    def certificate_expiry(self) -> float:
        """Unix time at which the certificate ends that the broker showed to this connection; infinity without TLS."""

    async def publish(
        self,
        subject: str,
        data: bytes,
        *,
        message_id: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> Stored:
        """Store a message and return the server's confirmation; retry under the same id until it comes.

        If the stream is full, wait until it has room (back-pressure) and count the wait. There is no deadline, because
        nothing may be dropped. DEAD is never full: it drops its oldest messages (see `dead_bytes`).
        Raises RecordTooLarge over `max_payload_bytes`, and BrokerDenied if the broker refuses the subject.
        """

    async def lease(self, timeout_s: float) -> Delivery | None:
        """Return the next ticket message under a lease, or None if `timeout_s` passes without one."""

    async def reader(self, stream: Stream, after: int, subject: str | None = None) -> Reader:
        """Read `stream` from the message that follows sequence `after`.

        `subject` restricts it to one subject, or to all that begin with a prefix (`weights.>`).
        """

    async def last(self, stream: Stream, subject: str) -> Message | None:
        """Return the newest message of a subject, or None."""

    async def extent(self, stream: Stream) -> Extent: ...

    async def queue(self) -> QueueState: ...

    async def purge(self, stream: Stream, below: int, subject: str | None = None) -> None:
        """Remove the messages with a sequence below `below`: all of them, or those under one subject."""

    async def put(self, key: Key, data: bytes, after: int | None = None) -> int:
        """Set a key and return its revision.

        With `after`, raises StateConflict if the key has another revision by now: another program has set it since.
        """

    async def get(self, key: Key) -> bytes | None: ...

    async def revision(self, key: Key) -> int:
        """Return the revision at which a key was last set, or 0 if it never was."""

    async def set_at(self, key: Key) -> float | None:
        """Return when a key was last set, in seconds since the epoch by the server's clock; None if it never was."""

    def watch(self, key: Key) -> AsyncIterator[bytes]:
        """Yield the key's present value, if it has one, then each later one. Intermediate values may be skipped."""

    async def close(self) -> None: ...


def dead_bytes(max_log_bytes: int) -> int:
    """Return how many bytes DEAD may hold next to a group log of `max_log_bytes`."""
    return min(DEAD_BYTES, max_log_bytes)


def check_gap(stream: str, wanted: int, first: int, last: int) -> None:
    """Raise LogGap if a stream that holds `first` to `last` cannot continue at `wanted`. Every reader calls it."""
    # Said aloud, since a reader that went on would lose groups in silence (conservation).
    if wanted < first:
        raise LogGap(
            f"{stream} begins at {first} but {wanted} is to be read next: it has been purged. Resume from a newer "
            "checkpoint, or begin a new run"
        )
    if wanted > last + 1:
        raise LogGap(
            f"{stream} ends at {last} but {wanted} is to be read next: this is not the log that was read before. "
            "Restore the broker's files, or begin a new run"
        )
