"""What a stream holds at this moment, read to its end: silence on the way is a broker in trouble, never the end."""

from collections.abc import AsyncGenerator

from horizonrl.broker.api import Message, Stream, Transport
from horizonrl.common.errors import BrokerUnreachable

AT_ONCE = 8
"""Messages that are taken at once: at most this many payloads are in memory."""
SILENCE_S = 10.0


async def read_stored(
    transport: Transport, stream: Stream, after: int, subject: str, at_once: int = AT_ONCE
) -> AsyncGenerator[Message, None]:
    """Yield what stands under a subject after sequence `after`, at least up to the last one of now.

    Use it with `aclosing`, which closes its reader. Raises LogGap, and BrokerUnreachable when what is stored does not
    come although the broker answers.
    """
    last = await transport.last(stream, subject)
    reader = await transport.reader(stream, after, subject)
    reached, silent = after, False
    try:
        end = last.sequence if last else reached
        while reached < end:
            messages = await reader.fetch(at_once, SILENCE_S)
            if not messages and silent:
                raise BrokerUnreachable(
                    f"{stream.value} holds {subject} up to {end}, but nothing has come after {reached} for "
                    f"{2 * SILENCE_S} s: look at the broker's log"
                )
            if silent := not messages:  # waits for a broker that is away; what is left if the rest was purged meanwhile
                last = await transport.last(stream, subject)
                end = min(end, last.sequence if last else reached)
            for message in messages:
                reached = message.sequence
                yield message
    finally:
        await reader.close()
