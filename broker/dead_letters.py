"""Dead letters: what cannot be decoded or was forged is stored unchanged, with the reason. Nothing is lost silently."""

from horizonrl.broker.api import Message, Stream, Transport
from horizonrl.common.logs import get_logger

log = get_logger()

REASON = "Horizon-Reason"
SUBJECT = "Horizon-Subject"
SEQUENCE = "Horizon-Sequence"
OFFSET = "Horizon-Offset"
MAX_REASON = 512


async def store_dead_letter(
    transport: Transport, stream: Stream, message: Message, reason: str, data: bytes | None = None
) -> None:
    """Store a message that is refused in DEAD; only once, however often it is read.

    `data` are the message's bytes where they came in parts, in other messages.
    """
    kept = message.data if data is None else data
    room = transport.max_payload_bytes  # joined parts are larger than a message
    headers = {
        REASON: _header_text(reason),
        SUBJECT: message.subject,
        SEQUENCE: str(message.sequence),
    }
    # At least once: an empty message is a dead letter too.
    for offset in range(0, max(len(kept), 1), room):
        suffix = f".{offset}" if offset else ""
        await transport.publish(
            f"dead.{stream.value.lower()}",
            kept[offset : offset + room],
            # A learner that resumes reads the message again, and stores the same pieces under the same ids.
            message_id=f"dead-{stream.value}-{message.sequence}{suffix}",
            headers={**headers, OFFSET: str(offset)},
        )
    transport.counters.dead_letters += 1
    log.warning(
        "dead_letter_stored", subject=message.subject, sequence=message.sequence, reason=reason
    )


def _header_text(text: str) -> str:
    """Return the text as one line of ASCII: a header can hold no more."""
    return " ".join(text.encode("ascii", "replace").decode().split())[:MAX_REASON]
