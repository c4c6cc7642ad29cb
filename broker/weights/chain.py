"""The chain: changes from version to version, as messages of the weights stream between two key frames.

Place in the flow: announced Version → actors. Every message says which version it leads from and to, how many bytes the
changes have, and the digest of the version that they make. So a reader needs no list of them: it reads on from where it
stands, and follows the one line of versions of its lineage (PROTOCOL.md, "Weights").
"""

import re
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from horizonrl.broker.api import Message, Transport
from horizonrl.broker.weights.frames import (
    FETCH_WAIT_S,
    OFFSET,
    POLICY,
    PUBLISHED_AT_ONCE,
    publish_chunks,
    reading,
)
from horizonrl.common.errors import WeightsDamaged
from horizonrl.common.state import SentFile
from horizonrl.common.types import PolicyVersion

CHANGES = "weights.changes"
BASE = "Horizon-Base"
BYTES = "Horizon-Bytes"
DIGEST = "Horizon-Digest"
VERSION = re.compile(r"v(\d{1,15})\.l(\d{1,15})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Changes:
    """What turns the weights of `base` into those of `policy`."""

    base: PolicyVersion
    policy: PolicyVersion
    digest: str
    """Of the weights that they make."""
    data: bytes
    last_sequence: int
    """Sequence of the last message that was read for them."""


@dataclass(frozen=True, slots=True)
class _Link:
    """What one message says about the changes that it is a part of."""

    base: PolicyVersion
    policy: PolicyVersion
    digest: str
    total_bytes: int
    offset: int

    @classmethod
    def of(cls, message: Message) -> "_Link | None":
        """Return what the headers say, or None if they do not say it: then nothing can be done with the message."""
        headers = message.headers
        base, policy = (VERSION.fullmatch(headers.get(name, "")) for name in (BASE, POLICY))
        sizes = [headers.get(name, "") for name in (BYTES, OFFSET)]
        if (
            base is None
            or policy is None
            or not all(re.fullmatch(r"[0-9]{1,15}", size) for size in sizes)
        ):
            return None
        first, second = (
            PolicyVersion(version=int(match[1]), lineage=int(match[2])) for match in (base, policy)
        )
        return cls(first, second, headers.get(DIGEST, ""), int(sizes[0]), int(sizes[1]))


async def publish_changes(
    transport: Transport, data: bytes, base: PolicyVersion, policy: PolicyVersion, digest: str
) -> int:
    """Store the changes from `base` to `policy`, which has `digest`; return the sequence of their last message."""
    headers = {BASE: str(base), BYTES: str(len(data)), DIGEST: digest}
    return max(await publish_chunks(transport, CHANGES, data, "c", policy, headers))


async def read_changes(
    transport: Transport,
    manifest: SentFile,
    have: PolicyVersion,
    after: int,
    received: Callable[[int], None] = lambda _: None,
) -> AsyncGenerator[Changes, None]:
    """Yield the changes that lead from `have` to the manifest's version, one by one, from sequence `after` on.

    `received` is told the bytes of each message. Raises WeightsDamaged if the chain has a hole, and LogGap if it
    begins after `have`.
    """
    async with reading(transport, manifest.last_change, after, CHANGES) as reader:
        parts: dict[int, bytes] = {}
        wanted = 1
        while have != manifest.policy:
            messages = await reader.fetch(min(wanted, PUBLISHED_AT_ONCE), FETCH_WAIT_S)
            for message in messages:
                received(len(message.data))
                link = _Link.of(message)
                # Others: of versions before `have`, and of a learner that was replaced and did not know it yet.
                if (
                    link is None
                    or link.base != have
                    or link.policy.lineage != manifest.policy.lineage
                ):
                    continue
                if (
                    not 0 < link.total_bytes <= manifest.weights_bytes
                    or link.offset >= link.total_bytes
                ):
                    raise WeightsDamaged(
                        f"{link.policy}: its changes do not fit weights of this size"
                    )
                parts[link.offset] = message.data
                missing = link.total_bytes - sum(map(len, parts.values()))
                # Asked for by number: a reader that looks further gets the next version's message several times.
                wanted = -(-missing // max(1, len(message.data)))
                if missing <= 0:
                    data, parts, wanted, have = (
                        b"".join(parts[offset] for offset in sorted(parts)),
                        {},
                        1,
                        link.policy,
                    )
                    yield Changes(link.base, link.policy, link.digest, data, message.sequence)
                    if have == manifest.policy:
                        return  # the next versions' changes may be among the messages
            # The manifest is set after its changes, so what is not there now does not come later.
            if not messages or messages[-1].sequence >= manifest.last_change:
                raise WeightsDamaged(
                    f"{manifest.policy}: the stream has no changes that lead on from {have}"
                )
