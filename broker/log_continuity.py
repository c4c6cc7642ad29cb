"""Continuity of the group log: whether it is still the log that was read, and where to resume if it is not.

A broker that loses power may lose the last messages that it had acknowledged, and gives their sequences to the messages
that come next. So a sequence alone does not identify an entry; a sequence with the entry's digest does.
"""

import xxhash

from horizonrl.broker.api import Message, Stream, Transport, check_gap
from horizonrl.broker.scan import SILENCE_S
from horizonrl.common.errors import BrokerUnreachable, LogGap

ID_LABEL = "Nats-Msg-Id"
"""What stands before the message id in the digested text. Checkpoints hold digests, so that it never changes, whichever
transport carried the message."""


def entry_digest(message: Message) -> str:
    """Return the xxh3_64 of a message of the group log: its subject, its id and headers sorted by name, its data."""
    # The id takes part: with equal data, another ticket's end is another entry.
    named = (
        message.headers
        if message.message_id is None
        else {**message.headers, ID_LABEL: message.message_id}
    )
    headers = "\n".join(f"{name}: {named[name]}" for name in sorted(named))
    return xxhash.xxh3_64_hexdigest(f"{message.subject}\n{headers}\n\n".encode() + message.data)


async def resume_position(transport: Transport, cursor: int, digest: str) -> int:
    """Return the sequence after which to resume from `cursor`, whose entry had `digest` ("" if it is not known).

    That is the cursor itself, unless the log has lost its end. Then it is the start of the log: everything that is left
    is read again, and tickets that were settled are recognised by their number. Raises LogGap if the entries after the
    cursor have been purged, or if the log has never held anything.
    """
    extent = await transport.extent(Stream.GROUPS)
    first, last = max(1, extent.first_sequence), extent.last_sequence
    # A log that has never held anything belongs to another broker, so it is a gap and not a loss.
    if cursor + 1 < first or last == 0:
        check_gap(Stream.GROUPS.value, cursor + 1, first, last)
    # With the entry freed or its digest unknown, there is nothing to compare, and the cursor stands.
    if cursor <= last and (
        cursor < first or not digest or await _digest_at(transport, cursor) == digest
    ):
        return cursor
    return first - 1


async def check_continuity(transport: Transport, cursor: int, digest: str) -> None:
    """Raise LogGap if the log has lost its end since the entry at `cursor` was read."""
    if await resume_position(transport, cursor, digest) != cursor:
        raise LogGap(
            f"the group log is no longer the one that was read up to {cursor}, as after a power cut at the broker: "
            "start the learner again, and it resumes from what is left"
        )


async def _digest_at(transport: Transport, sequence: int) -> str:
    reader = await transport.reader(Stream.GROUPS, sequence - 1)
    try:
        messages = await reader.fetch(1, SILENCE_S)
    finally:
        await reader.close()
    if not messages:
        raise BrokerUnreachable(
            f"the group log holds {sequence}, but did not deliver it for {SILENCE_S} s"
        )
    return entry_digest(messages[0]) if messages[0].sequence == sequence else ""
