"""Ticket signatures: the learner's proof that a group answers a ticket of its controller, one that its actor was given.

Controller and learner share a key that no actor has. A ticket's signature has two halves of 32 hexadecimal digits, both
HMAC-SHA256 truncated to 128 bits. The first half signs the ticket's id. It is part of the message id under which the
ticket ends, so nobody can use that id without having been given the ticket. The second half signs the whole ticket.
Both are pure functions, so a resumed learner judges the same log in the same way. Without a key nothing is signed, and
everyone who reaches the broker is trusted.
"""

import hashlib
import hmac
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from horizonrl.broker.codec import encode
from horizonrl.common.errors import ConfigError, ForgedRecord
from horizonrl.common.types import SIGNATURE_HALF, Ticket

TICKET_ID = re.compile(r"(?:train|demo|eval)-(?:\d{8}|[1-9]\d{8,14})", re.ASCII)
"""A ticket's id as it is written, the number below 2^53."""
LEAST_KEY = 32
"""Fewest bytes of a key."""


@dataclass(frozen=True, slots=True)
class TicketSigner:
    run: str
    key: bytes | None = None

    @classmethod
    def load(cls, run: str, path: Path | None) -> Self:
        """Read the key. Raises ConfigError if it is missing or too short; the message never contains the file."""
        if path is None:
            return cls(run)
        if not path.is_file():
            raise ConfigError(f"broker.ticket_key is {path}: there is no such file")
        key = path.read_bytes().strip()
        if len(key) < LEAST_KEY:
            raise ConfigError(
                f"broker.ticket_key is {path}: {len(key)} bytes, a key has at least {LEAST_KEY}"
            )
        return cls(run, key)

    @property
    def signs(self) -> bool:
        """Whether tickets are signed, so that an end id proves that the controller issued its ticket."""
        return self.key is not None

    @property
    def fingerprint(self) -> str:
        """What tells two keys of a run apart and gives neither away; empty without a key."""
        return (
            hmac.digest(self.key, self.run.encode() + b"\nfingerprint", hashlib.sha256).hex()[:32]
            if self.key
            else ""
        )

    def sign(self, ticket: Ticket) -> Ticket:
        """Return the ticket with its signature."""
        return (
            ticket.model_copy(update={"signature": self._signature(ticket)}) if self.key else ticket
        )

    def verify(self, ticket: Ticket) -> None:
        """Raise ForgedRecord unless the ticket was signed with this key and has not been altered since."""
        if self.key and not hmac.compare_digest(ticket.signature, self._signature(ticket)):
            raise ForgedRecord(
                f"{ticket.ticket_id} was not issued by this run's controller, or was altered"
            )

    def ended_by(self, message_id: str) -> str | None:
        """Return the id of the ticket that a message under this id may end, or None if it may end none."""
        ticket_id, dot, half = message_id.partition(".")
        # One spelling only: a second id for the same ticket would let it end twice.
        if not TICKET_ID.fullmatch(ticket_id):
            return None
        # In constant time, so that nobody can find the half digit by digit. Without a key, an end id has no half.
        genuine = (
            hmac.compare_digest(half.encode(), self._half(ticket_id.encode()).encode())
            if self.key
            else not dot
        )
        return ticket_id if genuine else None

    def _signature(self, ticket: Ticket) -> str:
        # The signature is a field of what it signs, so it is left empty there.
        unsigned = encode(ticket.model_copy(update={"signature": ""}))
        return self._half(ticket.ticket_id.encode()) + self._half(unsigned)

    def _half(self, signed: bytes) -> str:
        """Return the tag of some bytes. It covers the run's name, so that runs may share a key."""
        return hmac.digest(
            self.key or b"", self.run.encode() + b"\n" + signed, hashlib.sha256
        ).hex()[:SIGNATURE_HALF]
