"""What is around the sections of changes: a digest of all of it, and of the header of the image that it is for."""

import struct
from collections.abc import Sequence

import xxhash

from horizonrl.broker.weights.layout import Layout

MAGIC = b"HZC1"
ENVELOPE = struct.Struct("<4s16s16sQI")
"""Magic, digest of all that follows it, digest of the image's header, bytes of the image, number of sections."""
DIGESTED = 20
"""Where the bytes begin that the digest covers."""
LENGTH = struct.Struct("<Q")


def join_sections(layout: Layout, sections: Sequence[bytes]) -> bytes:
    """Return the changes of a whole image from sections, in any order, of disjoint parts of it."""
    image = layout.header_digest + struct.pack("<QI", layout.image_bytes, len(sections))
    rest = b"".join(
        [image, *(piece for section in sections for piece in (LENGTH.pack(len(section)), section))]
    )
    return MAGIC + xxhash.xxh3_128_digest(rest) + rest
