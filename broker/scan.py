"""Scan a stream: read what it holds now, to its end. Silence on the way means a broker in trouble, never the end."""

from collections.abc import AsyncGenerator

from horizonrl.broker.api import Message, Stream, Transport
from horizonrl.common.errors import BrokerUnreachable

BATCH_MESSAGES = 64
"""Messages per fetch, if they are small: a transport may end a fetch earlier, to bound the memory."""
SILENCE_S = 10.0
"""Seconds without a message after which the last one is looked up again; after twice as long the broker is at fault."""


async def scan(
    transport: Transport, stream: Stream, after: int, subject: str, batch: int = BATCH_MESSAGES
) -> AsyncGenerator[Message, None]:
    """Yield the messages of a subject after sequence `after`, at least up to the one that is the last now.

    Use it with `aclosing`, which closes its reader. Raises LogGap, and BrokerUnreachable if the broker answers but does
    not deliver what it stores.
    """
    # The end is fixed first: a scan of a stream that grows all the time would otherwise never end.
    last = await transport.last(stream, subject)
    reader = await transport.reader(stream, after, subject)
    reached, silent = after, False
    try:
        end = last.sequence if last else reached
        while reached < end:
            messages = await reader.fetch(batch, SILENCE_S)
            if not messages and silent:
                raise BrokerUnreachable(
                    f"{stream.value} holds {subject} up to {end}, but delivered nothing after {reached} for "
                    f"{2 * SILENCE_S} s: look at the broker's log"
                )
            # `last` waits for a broker that is away; the rest may have been purged meanwhile.
            if silent := not messages:
                last = await transport.last(stream, subject)
                end = min(end, last.sequence if last else reached)
            for message in messages:
                reached = message.sequence
                yield message
    finally:
        await reader.close()
