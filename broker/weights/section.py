"""The head of a section of changes: its classes, its parts, and where its streams are. PROTOCOL.md, section Changes.

Place in the flow: `encoding.py` writes it, `decoding.py` reads it. All of it is LEB128 integers, so that it stays small
when a version changes little: about 10 kB for the 272 tensors of SmolLM2.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from horizonrl.broker.weights.kernels import LARGEST_RICE, PROBABILITY_BITS, SYMBOLS, read_varints
from horizonrl.broker.weights.layout import Array
from horizonrl.common.errors import WeightsRejected

MOST_CLASSES = 64
MOST_WORDS = 1 << 30
"""Of a part: positions in it have 32 bits."""

EXPONENT_SHIFTS = {"BF16": 7, "F16": 10}
"""Bits below the exponent of a 16-bit float, by safetensors' name."""
WHOLE_WORD = 15
"""The shift for other types, whose 16-bit words are all of one class: exact, but not small."""


@dataclass(frozen=True)
class ValueClass:
    """The words whose old exponent is from `first` to `last`, in the parts of this shift."""

    shift: int
    first: int
    last: int
    frequency_S: Array
    """Of the 64 symbols; they add up to 1024."""
    gap_bytes: int
    """Length of the stream of gaps."""
    value_words: int
    """Length of the stream of symbols, in words of 16 bits."""


@dataclass(frozen=True)
class Head:
    classes: list[ValueClass]
    offset_P: Array
    """Of each part's first byte in the file; they ascend."""
    words_P: Array
    shift_P: Array
    counts_PC: Array
    """Changed words."""
    rice_PC: Array
    """Golomb-Rice parameters."""
    odd: list[tuple[int, int]]
    """Offset and new value of changed last bytes of parts with an odd number of bytes."""


def head_bytes(head: Head) -> bytes:
    out: list[int] = [len(head.classes)]
    for group in head.classes:
        present = np.flatnonzero(group.frequency_S).tolist()
        out += [
            group.shift,
            group.first,
            group.last,
            group.gap_bytes,
            group.value_words,
            len(present),
        ]
        for symbol in present:
            out += [symbol, int(group.frequency_S[symbol])]
    out.append(len(head.offset_P))
    distances_P = head.offset_P - np.concatenate([[0], (head.offset_P + 2 * head.words_P)[:-1]])
    columns = [a[:, None] for a in (distances_P, head.words_P, head.shift_P)]
    out += (
        np.concatenate([*columns, head.counts_PC, head.rice_PC], 1).ravel().tolist()
        if len(head.offset_P)
        else []
    )
    out += [len(head.odd), *(number for pair in head.odd for number in pair)]
    return b"".join(map(_varint, out))


def _varint(value: int) -> bytes:
    """Return LEB128: seven bits per byte, the lowest first, and the high bit set on all but the last."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def read_head(data: Array, size: int, data_offset: int, image_bytes: int) -> tuple[Head, int]:
    """Return the head of the first `size` bytes and where the streams begin, all checked. Raises WeightsRejected."""
    numbers = _Numbers(data, size)
    (count,) = numbers.read(1)
    if count > MOST_CLASSES:
        raise WeightsRejected(f"the changes name {count} classes, more than {MOST_CLASSES}")
    classes = [_read_class(numbers) for _ in range(count)]
    keys = [(group.shift, group.first, group.last) for group in classes]
    if any((a[0] == b[0] and a[2] >= b[1]) or a[0] > b[0] for a, b in pairwise(keys)):
        raise WeightsRejected(f"the classes overlap, or are not in order: {keys}")
    (parts,) = numbers.read(1)
    table = numbers.read_array(parts * (3 + 2 * count)).reshape(parts, 3 + 2 * count)
    # Bounded before they are added up, so that no sum overflows.
    if table[:, :2].max(initial=0) > image_bytes:
        raise WeightsRejected(f"a part lies outside of the image's {image_bytes} bytes")
    distance_P, words_P, shift_P = table[:, 0], table[:, 1], table[:, 2]
    counts_PC, rice_PC = table[:, 3 : 3 + count].copy(), table[:, 3 + count :].copy()
    offset_P = np.cumsum(distance_P + 2 * words_P) - 2 * words_P
    (odds,) = numbers.read(1)
    odd = [(int(a), int(b)) for a, b in numbers.read_array(2 * odds).reshape(odds, 2)]
    head = Head(classes, offset_P, words_P, shift_P, counts_PC, rice_PC, odd)
    _check_parts(head, data_offset, image_bytes)
    if numbers.at + sum(group.gap_bytes + 2 * group.value_words for group in classes) != size:
        raise WeightsRejected("the streams of a section are not as long as its head says")
    return head, numbers.at


class _Numbers:
    """Reads LEB128 integers, and never more than the bytes that are there."""

    def __init__(self, data: Array, size: int) -> None:
        self._data, self._size = data, size
        self.at = 0

    def read(self, count: int) -> list[int]:
        return [int(number) for number in self.read_array(count)]

    def read_array(self, count: int) -> Array:
        # An integer has at least a byte, so what is allocated is at most 8 times what came.
        if count > self._size - self.at:
            raise WeightsRejected("the head of a section ends early")
        out = np.empty(count, np.int64)
        self.at = read_varints(self._data, self.at, self._size, out)
        if self.at < 0:
            raise WeightsRejected(
                "the head of a section ends early, or holds a number of more than 56 bits"
            )
        return out


def _read_class(numbers: _Numbers) -> ValueClass:
    shift, first, last, gap_bytes, value_words, present = numbers.read(6)
    pairs = numbers.read_array(2 * present).reshape(present, 2)
    frequency_S = np.zeros(SYMBOLS, np.int64)
    if shift not in (*EXPONENT_SHIFTS.values(), WHOLE_WORD) or not first <= last < 1 << (
        15 - shift
    ):
        raise WeightsRejected(
            f"the class of exponents from {first} to {last}, shift {shift}, cannot be"
        )
    if (pairs[:, 0] >= SYMBOLS).any() or (pairs[:, 1] > 1 << PROBABILITY_BITS).any():
        raise WeightsRejected("a symbol or its frequency is out of bounds")
    frequency_S[pairs[:, 0]] = pairs[:, 1]
    if frequency_S.sum() != 1 << PROBABILITY_BITS or value_words < 2:
        raise WeightsRejected(
            "the frequencies of a class do not add up, or its stream has no state"
        )
    return ValueClass(shift, first, last, frequency_S, gap_bytes, value_words)


def _check_parts(head: Head, data_offset: int, image_bytes: int) -> None:
    end_P = head.offset_P + 2 * head.words_P
    if (head.words_P > MOST_WORDS).any():
        raise WeightsRejected(f"a part has more than {MOST_WORDS} words")
    if (head.offset_P < data_offset).any() or (end_P > image_bytes).any():
        raise WeightsRejected(
            f"a part lies outside of the tensors' bytes, {data_offset} to {image_bytes}"
        )
    if any(not data_offset <= offset < image_bytes or value > 255 for offset, value in head.odd):
        raise WeightsRejected("an odd byte lies outside of the tensors' bytes, or is none")
    if (head.counts_PC > head.words_P[:, None]).any() or (
        head.counts_PC.sum(1) > head.words_P
    ).any():
        raise WeightsRejected("a part has more changes than words")
    if (head.rice_PC > LARGEST_RICE).any():
        raise WeightsRejected(f"a Golomb-Rice parameter is above {LARGEST_RICE}")
    shift_C = np.array([group.shift for group in head.classes], np.int64)
    if (head.counts_PC * (shift_C[None, :] != head.shift_P[:, None])).any():
        raise WeightsRejected("a part has changes in a class of another type")
    # Every gap takes a bit: this bounds the memory by the bytes that came.
    gap_bytes_C = np.array([group.gap_bytes for group in head.classes], np.int64)
    if (head.counts_PC.sum(0) > 8 * gap_bytes_C).any():
        raise WeightsRejected("a class has more changes than its stream has bits")
