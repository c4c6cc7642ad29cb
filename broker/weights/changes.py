"""Changes: what turns one version's weights into the next one's, without loss and close to their entropy.

Place in the flow: **Version** → actors, between key frames. A pure function pair over whole safetensors images whose
headers are equal; PROTOCOL.md, section Changes, is the format. Neither side trusts the other: `decode_changes` reads
everything before a byte of the image is written.

How to use it:

- the learner with whole frames: `changes = encode_changes(old_image, new_image)`
- a learner whose ranks hold slices: each rank `encode_section([Part(offset, dtype, old, new), ...])`, with offsets from
  `read_layout(image)`; one of them `join_sections(read_layout(image), sections)`
- an actor: `apply_changes(image, changes)`; or `decoded = decode_changes(image, changes)` while the engine samples, and
  `decoded.write(image)` in the pause. Several deltas are applied in their order.

The changes carry a digest of themselves and of the header, not of the weights: that `image` is the base, and that the
result is the new version, the caller knows by the digests in its manifests (xxh3_128 of the whole image).
"""

import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import xxhash

from horizonrl.common.errors import WeightsRejected

Buffer = bytes | bytearray | memoryview | Any
"""Whatever `numpy.frombuffer` reads: bytes, a memory map, a contiguous array."""

MAGIC = b"HZC1"
_FRAME = struct.Struct("<4s16s16sQI")
_LENGTH = struct.Struct("<Q")


class Part(NamedTuple):
    """A run of elements of one tensor, before and after: all of the tensor, or a rank's slice of it."""

    offset: int
    """Of its first byte, from the start of the file."""
    dtype: str
    """As safetensors names it: BF16, F16, F32, ..."""
    old: Buffer
    new: Buffer


class TensorPlace(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """Of its first byte, from the start of the file."""
    size_bytes: int


@dataclass(frozen=True)
class Layout:
    """Where a safetensors image has its tensors."""

    image_bytes: int
    header_digest: bytes
    """xxh3_128 of the length and the JSON at the file's start: images with equal ones have changes between them."""
    tensors: dict[str, TensorPlace]


@dataclass(frozen=True)
class Decoded:
    """Changes that were read to the end and found whole, in memory: 6 bytes a changed word."""

    offsets: list[tuple[int, np.ndarray, np.ndarray]]

    def write(self, image: Buffer) -> None:
        """Patch the image that they were decoded for."""
        target = np.frombuffer(image, np.uint8)
        for offset, positions, words in self.offsets:
            count = (len(target) - offset) // 2
            target[offset : offset + 2 * count].view(np.uint16)[positions] = words


def read_layout(image: Buffer) -> Layout:
    """Return where a safetensors image has its tensors. Raises WeightsRejected for what is no such image."""
    data = np.frombuffer(image, np.uint8)
    if len(data) < 8:
        raise WeightsRejected(f"an image of {len(data)} bytes is no safetensors file")
    (length,) = _LENGTH.unpack(data[:8])
    if length > len(data) - 8:
        raise WeightsRejected(f"the safetensors header names {length} bytes of {len(data) - 8}")
    start = 8 + length
    try:
        header = json.loads(bytes(data[8:start]))
        tensors = {
            name: TensorPlace(
                entry["dtype"],
                tuple(entry["shape"]),
                start + entry["data_offsets"][0],
                entry["data_offsets"][1] - entry["data_offsets"][0],
            )
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsRejected(f"the safetensors header cannot be read: {error}") from None
    digest = xxhash.xxh3_128_digest(bytes(data[:start]))
    return Layout(len(data), digest, tensors)


def encode_changes(base: Buffer, new: Buffer) -> bytes:
    """Return what turns the image `base` into `new`. Raises WeightsRejected if their headers differ."""
    layout = read_layout(base)
    if (
        read_layout(new).header_digest != layout.header_digest
        or len(np.frombuffer(new, np.uint8)) != layout.image_bytes
    ):
        raise WeightsRejected("the images have different headers: send a key frame")
    old_data, new_data = np.frombuffer(base, np.uint8), np.frombuffer(new, np.uint8)
    parts = [
        Part(
            t.offset,
            t.dtype,
            old_data[t.offset : t.offset + t.size_bytes],
            new_data[t.offset : t.offset + t.size_bytes],
        )
        for t in layout.tensors.values()
    ]
    return join_sections(layout, [encode_section(parts)])


def encode_section(parts: Iterable[Part]) -> bytes:
    """Return the changes of some parts; sections of disjoint parts are joined in any order."""
    out = []
    for part in parts:
        old, new = np.frombuffer(part.old, np.uint16), np.frombuffer(part.new, np.uint16)
        positions = np.flatnonzero(old != new).astype(np.uint32)
        out += [struct.pack("<QQ", part.offset, len(positions)), positions.tobytes(), new[positions].tobytes()]
    return b"".join(out)


def join_sections(layout: Layout, sections: Sequence[bytes]) -> bytes:
    """Return the changes of a whole image from the sections that cover what has changed in it."""
    body = b"".join(_LENGTH.pack(len(section)) + section for section in sections)
    tail = layout.header_digest + struct.pack("<QI", layout.image_bytes, len(sections)) + body
    return MAGIC + xxhash.xxh3_128_digest(tail) + tail


def apply_changes(image: Buffer, changes: Buffer) -> None:
    """Patch a writable image in place. Raises WeightsRejected, before any byte is written, for malformed changes."""
    decode_changes(image, changes).write(image)


def decode_changes(image: Buffer, changes: Buffer) -> Decoded:
    """Return the changes, decoded against the image that they start from; the image is only read.

    Raises WeightsRejected for changes that are damaged, malformed, or of an image with another header.
    """
    data = memoryview(changes).cast("B")
    if len(data) < _FRAME.size:
        raise WeightsRejected(f"{len(data)} bytes are no changes")
    magic, digest, header_digest, image_bytes, count = _FRAME.unpack_from(data)
    if magic != MAGIC or digest != xxhash.xxh3_128_digest(data[20:]):
        raise WeightsRejected("the changes are damaged: their digest does not match")
    layout = read_layout(image)
    if header_digest != layout.header_digest or image_bytes != layout.image_bytes:
        raise WeightsRejected("the changes are of an image with another header")
    found = []
    at = _FRAME.size
    for _ in range(count):
        (length,) = _LENGTH.unpack_from(data, at)
        at += 8
        end = at + length
        while at < end:
            offset, changed = struct.unpack_from("<QQ", data, at)
            at += 16
            positions = np.frombuffer(data, np.uint32, changed, at)
            words = np.frombuffer(data, np.uint16, changed, at + 4 * changed)
            at += 6 * changed
            found.append((offset, positions, words))
    return Decoded(found)
