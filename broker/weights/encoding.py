"""From parts of an old and a new version to a section of changes."""

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from horizonrl.broker.weights import kernels
from horizonrl.broker.weights.kernels import PROBABILITY_BITS, SYMBOLS
from horizonrl.broker.weights.layout import Array, Part, as_bytes
from horizonrl.broker.weights.section import (
    EXPONENT_SHIFTS,
    MOST_WORDS,
    WHOLE_WORD,
    Head,
    ValueClass,
    head_bytes,
)

WANTED_CLASSES = 12
"""For each type: a class costs the reader 1.6 ms per 269 MB. SmolLM2's changes are 0.2 % smaller with 16, 2 % larger
with 8."""
CLASS_BITS = 2_000
"""About what a class takes in the head: exponents that gain less by a class of their own share their neighbour's."""
VALUE_SHARE = 0.25
"""Share of a class's entropy by exponent that the values lose if exponents are merged, about; measured on SmolLM2."""


def _pieces(part: Part) -> Iterator[Part]:
    """Cut a part that is too long for positions of 32 bits: stacked experts may have more than 2^32 words."""
    old, new = as_bytes(part.old), as_bytes(part.new)
    if len(old) != len(new):
        raise ValueError(
            f"the part at {part.offset} has {len(old)} bytes before and {len(new)} after"
        )
    for start in range(0, len(old), 2 * MOST_WORDS):
        end = start + 2 * MOST_WORDS
        yield Part(part.offset + start, part.dtype, old[start:end], new[start:end])


class _Pair:
    """A part as bytes, with its changes counted by exponent."""

    def __init__(self, part: Part) -> None:
        self.offset, self.old, self.new = part.offset, as_bytes(part.old), as_bytes(part.new)
        self.words = len(self.old) // 2
        self.shift = EXPONENT_SHIFTS.get(part.dtype, WHOLE_WORD)
        self.changed_E = np.zeros(1 << (15 - self.shift), np.int64)

    @property
    def addresses(self) -> tuple[np.uint64, np.uint64]:
        return np.uint64(self.old.ctypes.data), np.uint64(self.new.ctypes.data)


def encode(parts: Iterable[Part]) -> bytes:
    """Return the section of some parts."""
    pairs = sorted(
        (_Pair(piece) for part in parts for piece in _pieces(part)), key=lambda pair: pair.offset
    )
    sampled = {
        shift: np.zeros(1 << (15 - shift), np.int64)
        for shift in (*EXPONENT_SHIFTS.values(), WHOLE_WORD)
    }
    for pair in pairs:
        kernels.count_changes(
            *pair.addresses, pair.words, pair.shift, pair.changed_E, sampled[pair.shift]
        )
    odd = [
        (pair.offset + len(pair.old) - 1, int(pair.new[-1]))
        for pair in pairs
        if len(pair.old) % 2 and pair.old[-1] != pair.new[-1]
    ]
    pairs = [pair for pair in pairs if pair.changed_E.any()]
    ranges = [
        (shift, *bounds)
        for shift, members_E in sampled.items()
        for bounds in _ranges(pairs, shift, members_E)
    ]
    counts_PC = np.zeros((len(pairs), len(ranges)), np.int64)
    for p, pair in enumerate(pairs):
        for c, (shift, first, last) in enumerate(ranges):
            counts_PC[p, c] = pair.changed_E[first : last + 1].sum() if shift == pair.shift else 0
    gaps, values = _gather(pairs, ranges, counts_PC)
    rice_PC = np.zeros_like(counts_PC)
    classes, streams = [], []
    for c, end in enumerate(np.cumsum(counts_PC.sum(0))):
        mine = slice(end - counts_PC[:, c].sum(), end)
        rice_PC[:, c] = _rice_parameters(gaps[mine], counts_PC[:, c])
        frequency_S, gap_stream, value_stream = _streams(
            gaps[mine], values[mine], counts_PC[:, c], rice_PC[:, c]
        )
        classes.append(ValueClass(*ranges[c], frequency_S, len(gap_stream), len(value_stream) // 2))
        streams += [gap_stream, value_stream]
    offset_P, words_P, shift_P = (
        np.array([getattr(pair, name) for pair in pairs], np.int64)
        for name in ("offset", "words", "shift")
    )
    return b"".join(
        [head_bytes(Head(classes, offset_P, words_P, shift_P, counts_PC, rice_PC, odd)), *streams]
    )


def _ranges(pairs: list[_Pair], shift: int, sampled_E: Array) -> list[tuple[int, int]]:
    """Return the ranges of exponents that become the classes of one type."""
    changed_E = sum(
        (pair.changed_E for pair in pairs if pair.shift == shift), np.zeros_like(sampled_E)
    )
    return merged_exponents(changed_E, np.maximum(kernels.SAMPLED * sampled_E, changed_E))


def merged_exponents(changed_E: Array, members_E: Array) -> list[tuple[int, int]]:
    """Return ranges that cover every exponent with a change: neighbours are merged, what loses least of all first."""

    def bits(first: int, last: int) -> float:
        return _entropy_bits(changed_E[first : last + 1].sum(), members_E[first : last + 1].sum())

    def loss(lower: tuple[int, int], second: tuple[int, int]) -> float:
        a, b = (changed_E[first : last + 1].sum() for first, last in (lower, second))
        gaps = bits(lower[0], second[1]) - bits(*lower) - bits(*second)
        return float(gaps + VALUE_SHARE * _entropy_bits(min(a, b), a + b))

    ranges = [(int(e), int(e)) for e in np.flatnonzero(changed_E)]
    while len(ranges) > 1:
        losses = [loss(lower, second) for lower, second in pairwise(ranges)]
        least = int(np.argmin(losses))
        if len(ranges) <= WANTED_CLASSES and losses[least] > CLASS_BITS:
            break
        ranges[least : least + 2] = [(ranges[least][0], ranges[least + 1][1])]
    return ranges


def _entropy_bits(marked: Any, total: Any) -> float:
    """Return the information in which `marked` of `total` members are marked, in bits."""
    if not 0 < marked < total:
        return 0.0
    return float(-marked * np.log2(marked / total) - (total - marked) * np.log2(1 - marked / total))


def _gather(
    pairs: list[_Pair], ranges: list[tuple[int, int, int]], counts_PC: Array
) -> tuple[Array, Array]:
    """Return the gaps and the values of all changes, by class, then part, then position."""
    totals_C = counts_PC.sum(0)
    filled_C = np.cumsum(totals_C) - totals_C
    gaps, values = np.empty(totals_C.sum(), np.uint32), np.empty(totals_C.sum(), np.uint16)
    first_C = np.array([first for _, first, _ in ranges], np.uint8)
    span_C = np.array([last - first for _, first, last in ranges], np.uint8)
    for pair, counts_C in zip(pairs, counts_PC, strict=True):
        shift = np.uint16(pair.shift)
        kernels.gather(
            *pair.addresses,
            pair.words,
            shift,
            first_C,
            span_C,
            counts_C.copy(),
            gaps,
            values,
            filled_C,
        )
    return gaps, values


def _rice_parameters(gaps: Array, counts_P: Array) -> Array:
    """Return for each part the parameter under which its gaps are shortest."""
    rice_P = np.zeros_like(counts_P)
    start = 0
    for p, count in enumerate(counts_P.tolist()):
        if count:
            mine = gaps[start : start + count]
            start += count
            # For geometric gaps the best is near log2(0.69 mean): one of three.
            middle = int(0.69 * mine.mean()).bit_length()
            rice_P[p] = min(
                range(max(middle - 1, 0), min(middle + 2, 32)),
                key=lambda k: kernels.rice_bits(mine, k),
            )
    return rice_P


def _streams(
    gaps: Array, values: Array, counts_P: Array, rice_P: Array
) -> tuple[Array, bytes, bytes]:
    """Return a class's table of frequencies, its stream of gaps and its stream of symbols."""
    counts_S = np.zeros(SYMBOLS, np.int64)
    kernels.count_symbols(values, counts_S)
    frequency_S = frequencies(counts_S)
    # At most 56 bits of a gap and 13 of a value.
    gap_stream = np.zeros(9 * len(gaps) + 8, np.uint8)
    bits = kernels.pack_gaps(gaps, values, counts_P.copy(), rice_P.copy(), gap_stream)
    words = np.empty(len(values) + 2, np.uint16)
    start = kernels.pack_symbols(values, frequency_S, np.cumsum(frequency_S) - frequency_S, words)
    return frequency_S, gap_stream[: (bits + 7) // 8].tobytes(), words[start:].tobytes()


def frequencies(counts_S: Array) -> Array:
    """Return counts scaled to add up to 1024, with at least 1 for a symbol that occurs."""
    total = 1 << PROBABILITY_BITS
    share_S = counts_S * total / counts_S.sum()
    frequency_S: Array = np.where(counts_S > 0, np.maximum(np.round(share_S), 1), 0).astype(
        np.int64
    )
    while excess := int(frequency_S.sum()) - total:
        # One by one from the largest, where it matters least; 64 symbols are at most 63 off.
        frequency_S[np.argmax(frequency_S)] -= int(np.sign(excess))
    return frequency_S
