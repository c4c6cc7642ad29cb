"""Changes: what turns one version's weights into the next one's, without loss and close to their entropy.

Place in the flow: **Version** → actors, between key frames. A pure function pair over whole safetensors images whose
headers are equal; PROTOCOL.md, section Changes, is the format. The old weights, which both sides have, say how
probable a change is: where a weight is small, one unit in the last place is a small step. So the words of a tensor fall
into classes by their old exponent, and each class has its own density (gaps, Golomb-Rice) and its own table of values
(range asymmetric numeral system, rANS: arXiv 1311.2540).

How to use it:

- a learner with whole frames: `changes = encode_changes(old_image, new_image)`
- a learner whose ranks hold slices: each rank calls `encode_section([Part(offset, dtype, old, new), ...])`, with offsets
  from `read_layout(image)`; one of them calls `join_sections(read_layout(image), sections)`
- an actor: `apply_changes(image, changes)`; or `decoded = decode_changes(image, changes)` while the engine samples, and
  `decoded.write(image)` in its pause. Several deltas are applied in their order.

The changes carry a digest of themselves and of the header, not of the weights: that `image` is the base, and that the
result is the new version, the caller knows by the digests in its manifests (xxh3_128 of the whole image).

Needs numba, which comes with vLLM, on its first call and not before: the controller never loads it.
"""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import xxhash

from horizonrl.broker.weights.layout import Buffer, Layout, as_bytes, read_layout
from horizonrl.common.errors import MissingDependency, WeightsRejected

MAGIC = b"HZC1"
HEAD = struct.Struct("<4s16s16sQI")
"""Magic, digest of all that follows it, digest of the image's header, bytes of the image, sections."""
LENGTH = struct.Struct("<Q")
SHIFTS = {"BF16": 7, "F16": 10}
"""Bits below the exponent. Words of other types are one class: their changes are exact too, but not small."""
WHOLE_WORD = 15
MOST_CLASSES = 32
PADDING = bytes(8)
"""Bits are read 8 bytes at a time, up to 7 bytes behind their end."""

Array = np.ndarray[Any, np.dtype[Any]]


class Part(NamedTuple):
    """A run of elements of one tensor, before and after: all of the tensor, or a rank's slice of it."""

    offset: int
    """Of its first byte, from the start of the file."""
    dtype: str
    """As safetensors names it: BF16, F16, F32, ..."""
    old: Buffer
    new: Buffer


class Patch(NamedTuple):
    offset: int
    """Of the part, in bytes from the start of the file."""
    positions_P: Array
    """Of words within the part."""
    words_P: Array


@dataclass(frozen=True)
class Decoded:
    """Changes that were read to the end and found well-formed: 6 bytes in memory per changed word."""

    patches: list[Patch] = field(default_factory=list)
    bytes_: list[tuple[int, int]] = field(default_factory=list)
    """Offsets and new values of the last bytes of tensors with an odd number of them."""

    @property
    def changed_words(self) -> int:
        return sum(len(patch.positions_P) for patch in self.patches)

    def write(self, image: Buffer) -> None:
        """Patch the image that these changes were decoded for, in place."""
        kernels = _kernels()
        target = as_bytes(image)
        if not target.flags.writeable:
            raise TypeError("the image is read-only")
        for patch in self.patches:
            kernels.patch(_address(target, patch.offset), patch.positions_P, patch.words_P)
        for offset, value in self.bytes_:
            target[offset] = value


def encode_changes(base: Buffer, new: Buffer) -> bytes:
    """Return what turns the image `base` into `new`. Raises WeightsRejected if their headers differ."""
    layout = read_layout(base)
    other = read_layout(new)
    if (other.header_digest, other.image_bytes) != (layout.header_digest, layout.image_bytes):
        raise WeightsRejected(
            "the two images have different headers, so no changes lead between them: send a key frame"
        )
    olds, news = as_bytes(base), as_bytes(new)
    places = [(t.offset, t.offset + t.size_bytes, t.dtype) for t in layout.tensors.values() if t.size_bytes]
    return join_sections(
        layout, [encode_section(Part(first, dtype, olds[first:end], news[first:end]) for first, end, dtype in places)]
    )


def join_sections(layout: Layout, sections: Sequence[bytes]) -> bytes:
    """Return the changes of a whole image from sections, in any order, of disjoint parts of it."""
    body = [piece for section in sections for piece in (LENGTH.pack(len(section)), section)]
    rest = b"".join([layout.header_digest, struct.pack("<QI", layout.image_bytes, len(sections)), *body])
    return MAGIC + xxhash.xxh3_128_digest(rest) + rest


def apply_changes(image: Buffer, changes: Buffer) -> None:
    """Patch a writable image in place. Raises WeightsRejected, before any byte is written, for malformed changes."""
    decode_changes(image, changes).write(image)


def encode_section(parts: Iterable[Part]) -> bytes:
    """Return the changes of some parts. Takes twice 6 bytes of memory per changed word."""
    kernels = _kernels()
    # The layout reads tensors in the order of their names; offsets are sent as distances.
    parts = sorted(parts, key=lambda part: part.offset)
    found = [_Found(part) for part in parts if memoryview(part.old).nbytes >= 2]
    sampled = {shift: np.zeros(1 << (15 - shift), np.int64) for shift in (*SHIFTS.values(), WHOLE_WORD)}
    for part in found:
        kernels.count_changes(*part.addresses, part.words, part.shift, part.changed_E, sampled[part.shift])
    found = [part for part in found if part.changed_E.any()]
    classes = [
        (shift, first, last)
        for shift, members_E in sampled.items()
        for first, last in choose_classes(
            sum((part.changed_E for part in found if part.shift == shift), np.zeros_like(members_E)), 16 * members_E
        )
    ]
    counts_PC = np.array(
        [
            [part.changed_E[first : last + 1].sum() if shift == part.shift else 0 for shift, first, last in classes]
            for part in found
        ],
        np.int64,
    ).reshape(len(found), len(classes))
    gaps, values = _gather(found, classes, counts_PC)
    rice_PC = np.zeros_like(counts_PC)
    tables, streams = [], []
    ends_C = np.cumsum(counts_PC.sum(0))
    for c, end in enumerate(ends_C):
        mine = slice(end - counts_PC[:, c].sum(), end)
        table, stream = _encode_class(gaps[mine], values[mine], counts_PC[:, c], rice_PC[:, c])
        tables.append(table)
        streams.append(stream)
    head = [varint(len(classes))]
    for (shift, first, last), table in zip(classes, tables, strict=True):
        head += [bytes([shift]), varint(first), varint(last), table]
    head += [varint(len(found)), *_part_heads(found, classes, counts_PC, rice_PC)]
    odd = [
        (p.offset + len(old) - 1, new[-1])
        for p in parts
        if len(old := as_bytes(p.old)) % 2 and (new := as_bytes(p.new))[-1] != old[-1]
    ]
    head += [varint(len(odd)), *(varint(offset) + bytes([value]) for offset, value in odd)]
    return b"".join([*head, *streams])


class _Found:
    def __init__(self, part: Part) -> None:
        self.old, self.new = as_bytes(part.old), as_bytes(part.new)
        if len(self.old) != len(self.new):
            raise ValueError(f"a part has {len(self.old)} bytes before and {len(self.new)} bytes after")
        self.offset = part.offset
        self.words = len(self.old) // 2
        self.shift = SHIFTS.get(part.dtype, WHOLE_WORD)
        self.changed_E = np.zeros(1 << (15 - self.shift), np.int64)

    @property
    def addresses(self) -> tuple[np.uint64, np.uint64]:
        return _address(self.old), _address(self.new)


def _gather(found, classes, counts_PC):
    kernels = _kernels()
    totals_C = counts_PC.sum(0)
    filled_C = np.cumsum(totals_C) - totals_C
    gaps, values = np.empty(totals_C.sum(), np.uint32), np.empty(totals_C.sum(), np.uint16)
    low_C, width_C = _ranges(classes)
    for part, counts_C in zip(found, counts_PC, strict=True):
        kernels.gather(*part.addresses, part.words, low_C, width_C, counts_C.copy(), gaps, values, filled_C)
    return gaps, values


def _ranges(classes):
    low_C = np.array([first << shift for shift, first, _ in classes], np.uint16)
    width_C = np.array([(last + 1 - first) << shift for shift, first, last in classes], np.uint16)
    return low_C, width_C


def _encode_class(gaps, values, counts_P, rice_P):
    kernels = _kernels()
    first_P = np.concatenate([[0], np.cumsum(counts_P)])
    for p in np.flatnonzero(counts_P):
        mine = gaps[first_P[p] : first_P[p + 1]]
        guess = int(mine.mean() * 0.69 + 1).bit_length() - 1
        rice_P[p] = min(range(max(guess - 1, 0), guess + 2), key=lambda k: kernels.rice_bits(mine, k))
    counts_S = np.zeros(kernels.SYMBOLS, np.int64)
    kernels.count_symbols(values, counts_S)
    frequency_S = normalised(counts_S, kernels.TOTAL)
    starts_S = np.cumsum(frequency_S) - frequency_S
    out = np.zeros(9 * len(values) + 8, np.uint8)
    bits = kernels.pack_bits(gaps, values, first_P, rice_P.copy(), out)
    coded = np.empty(len(values) + 2, np.uint16)
    begin = kernels.pack_symbols(values, frequency_S, starts_S, coded)
    present = sum(1 << int(s) for s in np.flatnonzero(frequency_S))
    table = b"".join(
        [
            LENGTH.pack(present),
            *(varint(int(f)) for f in frequency_S[frequency_S > 0]),
            varint((bits + 7) // 8),
            varint(len(coded) - begin),
        ]
    )
    return table, out[: (bits + 7) // 8].tobytes() + coded[begin:].astype("<u2").tobytes()


def _part_heads(found, classes, counts_PC, rice_PC):
    at = 0
    for part, counts_C, rice_C in zip(found, counts_PC.tolist(), rice_PC.tolist(), strict=True):
        pieces = [varint(part.offset - at), varint(part.words), bytes([part.shift])]
        for (shift, _, _), count, rice in zip(classes, counts_C, rice_C, strict=True):
            if shift == part.shift:
                pieces.append(varint(count) + (bytes([rice]) if count else b""))
        at = part.offset + 2 * part.words
        yield b"".join(pieces)


def choose_classes(changed_E: Array, members_E: Array) -> list[tuple[int, int]]:
    """Return ranges of exponents that cover all changes: neighbours share a class where that costs little."""
    members_E = np.maximum(members_E, changed_E)
    ranges = [(int(e), int(e)) for e in np.flatnonzero(changed_E)]

    def size(first, last):
        n = changed_E[first : last + 1].sum()
        return _entropy(n, members_E[first : last + 1].sum())

    while len(ranges) > 1:
        losses = []
        for (a, b), (c, d) in zip(ranges, ranges[1:]):
            n1, n2 = changed_E[a : b + 1].sum(), changed_E[c : d + 1].sum()
            losses.append(size(a, d) - size(a, b) - size(c, d) + VALUE_LOSS * _entropy(n1, n1 + n2))
        best = int(np.argmin(losses))
        if len(ranges) <= MOST and losses[best] > CLASS_BITS + 0.0005 * size(0, len(changed_E)):
            break
        ranges[best : best + 2] = [(ranges[best][0], ranges[best + 1][1])]
    return ranges


VALUE_LOSS = 0.25
CLASS_BITS = 1000
MOST = 20


def _entropy(n, total):
    return -n * np.log2(n / total) - (total - n) * np.log2(1 - n / total) if 0 < n < total else 0.0


def normalised(counts_S: Array, total: int) -> Array:
    """Return frequencies that add up to `total`, at least one for each symbol that occurs."""
    share_S = counts_S * total / max(counts_S.sum(), 1)
    frequency_S = np.where(counts_S > 0, np.maximum(np.floor(share_S), 1), 0).astype(np.int64)
    while (missing := total - int(frequency_S.sum())) != 0:
        # What the roundings left goes to the largest, where it changes least.
        largest = int(np.argmax(frequency_S))
        frequency_S[largest] += max(missing, 1 - int(frequency_S[largest]) // 2 - 1)
    return frequency_S


def varint(value: int) -> bytes:
    """Return LEB128: seven bits a byte, the lowest first, the high bit set on all but the last."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def decode_changes(image: Buffer, changes: Buffer) -> Decoded:
    """Return the changes, decoded against the image that they start from; the image is only read.

    Raises WeightsRejected for changes that are damaged, malformed, or of an image with another header.
    """
    data = as_bytes(changes)
    if len(data) < HEAD.size:
        raise WeightsRejected(f"{len(data)} bytes are no changes")
    magic, digest, header_digest, image_bytes, count = HEAD.unpack_from(data)
    if magic != MAGIC or digest != xxhash.xxh3_128_digest(data[20:]):
        raise WeightsRejected("the changes are damaged: their digest does not match")
    layout = read_layout(image)
    if header_digest != layout.header_digest or image_bytes != layout.image_bytes:
        raise WeightsRejected("the changes are of an image with another header")
    target = as_bytes(image)
    out = Decoded()
    at = HEAD.size
    for _ in range(count):
        length = LENGTH.unpack_from(data, at)[0]
        at += 8
        _decode_section(target, layout, data[at : at + length].tobytes() + PADDING, out)
        at += length
    return out


class Reader:
    def __init__(self, data):
        self.data = data
        self.at = 0
        self.end = len(data) - len(PADDING)

    def byte(self):
        v = self.data[self.at]
        self.at += 1
        return v

    def varint(self):
        v = s = 0
        while True:
            b = self.byte()
            v |= (b & 127) << s
            s += 7
            if b < 128:
                return v


def _decode_section(target, layout, section, out):
    kernels = _kernels()
    r = Reader(section)
    n = r.varint()
    classes = []
    tables = np.zeros((n, kernels.TOTAL), np.uint32)
    sizes = []
    for c in range(n):
        classes.append((r.byte(), r.varint(), r.varint()))
        present = LENGTH.unpack_from(section, r.at)[0]
        r.at += 8
        start = 0
        for s in range(64):
            if present >> s & 1:
                f = r.varint()
                tables[c, start : start + f] = (s << 24) | ((f - 1) << 12) | np.arange(f, dtype=np.uint32)
                start += f
        sizes.append((r.varint(), r.varint()))
    parts = []
    at = 0
    for _ in range(r.varint()):
        offset = at + r.varint()
        words = r.varint()
        shift = r.byte()
        at = offset + 2 * words
        counts = np.zeros(n, np.int64)
        rice = np.zeros(n, np.int64)
        for c in range(n):
            if classes[c][0] == shift:
                counts[c] = r.varint()
                if counts[c]:
                    rice[c] = r.byte()
        parts.append((offset, words, counts, rice))
    for _ in range(r.varint()):
        out.bytes_.append((r.varint(), r.byte()))
    base = np.frombuffer(section, np.uint8)
    bits = []
    bits_end = []
    coded = []
    coded_end = []
    state = []
    at = r.at
    for b, w in sizes:
        bits.append(8 * at)
        at += b
        bits_end.append(8 * at)
        state.append(int.from_bytes(section[at : at + 4], "little"))
        coded.append(at + 4)
        at += 2 * w
        coded_end.append(at)
    bits, bits_end, coded, coded_end = (np.array(x, np.int64) for x in (bits, bits_end, coded, coded_end))
    state = np.array(state, np.uint64)
    total = sum(int(p[2].sum()) for p in parts)
    positions = np.empty(total, np.uint32)
    words_ = np.empty(total, np.uint16)
    low, width = _ranges(classes)
    at = 0
    for offset, words, counts, rice in parts:
        end = kernels.unpack(
            _address(target, offset),
            words,
            low,
            width,
            counts,
            rice,
            bits,
            bits_end,
            coded,
            coded_end,
            state,
            tables,
            _address(base),
            positions,
            words_,
            at,
        )
        if end < 0:
            raise WeightsRejected("malformed")
        out.patches.append(Patch(offset, positions[at:end], words_[at:end]))
        at = end


def _address(data: Array, offset: int = 0) -> np.uint64:
    return np.uint64(data.ctypes.data + offset)


def _kernels() -> Any:
    try:
        from horizonrl.broker.weights import kernels
    except ImportError as error:
        raise MissingDependency(f"weights as changes need {error.name}: pip install numba") from error
    return kernels
