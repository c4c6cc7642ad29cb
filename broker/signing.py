"""Seals: how the learner knows that a group answers a ticket which its controller issued, and to this actor.

Controller and learner share a key that no actor has. A ticket's seal has two halves of 32 hexadecimal digits. The first
is of its id: it is part of the message id under which the ticket ends, so that nobody who was not given the ticket can
take that id. The second is of all that the ticket says. Both are pure functions, so that a resumed learner judges the
same log the same way. Without a key nothing is sealed and everyone who reaches the broker is believed.
"""

import hashlib
import hmac
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from horizonrl.broker.codec import encode
from horizonrl.common.errors import ConfigError, ForgedRecord
from horizonrl.common.types import SEAL_HALF, Ticket

TICKET_ID = re.compile(r"(?:train|demo|eval)-(?:\d{8}|[1-9]\d{8,14})", re.ASCII)
"""A ticket's id as it is written, the number below 2^53."""
LEAST_KEY = 32


@dataclass(frozen=True, slots=True)
class Seals:
    run: str
    key: bytes | None = None

    @classmethod
    def load(cls, run: str, path: Path | None) -> Self:
        """Read the key. Raises ConfigError, without what the file holds, when it is none."""
        if path is None:
            return cls(run)
        if not path.is_file():
            raise ConfigError(f"broker.ticket_key is {path}: there is no such file")
        key = path.read_bytes().strip()
        if len(key) < LEAST_KEY:
            raise ConfigError(f"broker.ticket_key is {path}: {len(key)} bytes, at least {LEAST_KEY} are a key")
        return cls(run, key)

    @property
    def sealing(self) -> bool:
        """Whether a ticket's id proves that the controller issued it."""
        return self.key is not None

    def seal(self, ticket: Ticket) -> Ticket:
        """Return the ticket with its seal."""
        return ticket.model_copy(update={"seal": self._seal(ticket)}) if self.key else ticket

    def check(self, ticket: Ticket) -> None:
        """Raise ForgedRecord unless the ticket was sealed with this key and not altered since."""
        if self.key and not hmac.compare_digest(ticket.seal, self._seal(ticket)):
            raise ForgedRecord(f"{ticket.ticket_id} was not issued by this run's controller, or was altered")

    def ended_by(self, message_id: str) -> str | None:
        """Return the ticket that a message under this id may end, or None."""
        ticket_id, dot, half = message_id.partition(".")
        if not TICKET_ID.fullmatch(ticket_id):
            return None
        genuine = hmac.compare_digest(half.encode(), self._half(ticket_id.encode()).encode()) if self.key else not dot
        return ticket_id if genuine else None

    def _seal(self, ticket: Ticket) -> str:
        unsealed = encode(ticket.model_copy(update={"seal": ""}))
        return self._half(ticket.ticket_id.encode()) + self._half(unsealed)

    def _half(self, said: bytes) -> str:
        """Return the tag of some bytes; the run's name keeps the tickets of runs with one key apart."""
        return hmac.digest(self.key or b"", self.run.encode() + b"\n" + said, hashlib.sha256).hex()[:SEAL_HALF]
