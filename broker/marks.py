"""Marks: whether the group log is still the one that was read, and where to read on when it is not.

A broker that loses power may lose the last messages that it had acknowledged (`broker.durability`), and gives their
sequences to the messages that come next. So a sequence alone names no entry; its mark, a digest of the message, does.
"""

import xxhash

from horizonrl.broker.api import Message, Stream, Transport
from horizonrl.broker.nats.reader import check_gap
from horizonrl.broker.reading import SILENCE_S
from horizonrl.common.errors import BrokerUnreachable, LogGap


def mark_of(message: Message) -> str:
    """Return the xxh3_64 of what a message of the group log says."""
    headers = "\n".join(f"{name}: {message.headers[name]}" for name in sorted(message.headers))
    return xxhash.xxh3_64_hexdigest(f"{message.subject}\n{headers}\n\n".encode() + message.data)


async def place_of(transport: Transport, cursor: int, mark: str) -> int:
    """Return the sequence after which to read on from `cursor`, whose entry had `mark` ("" when that is not known).

    That is the cursor itself, unless the log has lost its end: then everything that it still holds is to be read again.
    What has been settled is recognised by its ticket. Raises LogGap when what follows the cursor has been purged, or
    when the log has never held anything.
    """
    extent = await transport.extent(Stream.GROUPS)
    first, last = max(1, extent.first_sequence), extent.last_sequence
    if cursor + 1 < first or last == 0:
        check_gap(Stream.GROUPS.value, cursor + 1, first, last)
    if cursor <= last and (cursor < first or not mark or await _mark_at(transport, cursor) == mark):
        return cursor
    return first - 1


async def check_same(transport: Transport, cursor: int, mark: str) -> None:
    """Raise LogGap when the log has lost its end since the entry at `cursor` was read."""
    if await place_of(transport, cursor, mark) != cursor:
        raise LogGap(
            f"the group log is not the one that was read up to {cursor} any more, as after a power cut of the broker: "
            "start the learner again, it reads on from what is left"
        )


async def _mark_at(transport: Transport, sequence: int) -> str:
    reader = await transport.reader(Stream.GROUPS, sequence - 1)
    try:
        messages = await reader.fetch(1, SILENCE_S)
    finally:
        await reader.close()
    if not messages:
        raise BrokerUnreachable(f"the group log holds {sequence}, but it has not come for {SILENCE_S} s")
    return mark_of(messages[0]) if messages[0].sequence == sequence else ""
