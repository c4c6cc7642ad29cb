"""The loops of the change codec, compiled by numba. `encoding.py` and `decoding.py` call them.

Place in the flow: inside the codec. A tile is 64 blocks of 64 words and stays in the first-level cache (8 KB, and 4 KB
of exponents) while every class looks at it: a class's members in a block are one comparison of a vector register, so
134.5 M words and 12 classes take 20 ms on top of the 22 ms that reading 269 MB takes. Sizes and streams were checked
before; what only shows while decoding (a stream that ends early, a gap behind the last member) ends it with a mark.
All loops release the GIL.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from typing import Any, NamedTuple

import numpy as np
from numba import int64, njit, uint16, uint32, uint64

from horizonrl.broker.weights.vectors import (
    BLOCK,
    compile_kernel,
    differing,
    load16,
    load32,
    load64,
    lowest,
    members,
    not_above,
    ones,
    select,
    store16,
    store32,
    store64,
    store_exponents,
)

PROBABILITY_BITS = 10
"""Frequencies of symbols add up to 1024; with 4096 the changes of SmolLM2 are 0.02 % smaller."""
SYMBOLS = 64
"""A value below 16 is its own symbol. Above, a symbol stands for its three leading bits; the rest is sent as it is."""
LONGEST_QUOTIENT = 24
"""A gap with a larger Golomb-Rice quotient is 24 zeros and 32 bits: a reader needs no more than 56 bits at once."""
LARGEST_RICE = 31
LOWEST_STATE = 1 << 16
"""rANS states are in [2^16, 2^32), and words of 16 bits enter and leave."""
TILE = BLOCK * BLOCK
SAMPLED = 16
"""One block of this many is looked at to learn how frequent an exponent is."""
SLOTS = 1 << PROBABILITY_BITS


class Streams(NamedTuple):
    """Where each class reads next. Addresses of bits are eight times those of bytes, within `section`."""

    section: Any
    """Address of the section, with `decoding.PADDING` readable bytes behind it."""
    bits_C: Any
    bits_end_C: Any
    words_C: Any
    words_end_C: Any
    state_C: Any
    tables: Any
    """Address of a uint32 for each class and slot: symbol << 24 | frequency - 1 << 12 | place of the slot in it."""


class Undo(NamedTuple):
    """What was overwritten: addresses of uint32 positions within their part, and of the uint16 words there before."""

    positions: Any
    words: Any


@compile_kernel
def count_changes(old, new, words, shift, changed_E, sampled_E):
    """Add to `changed_E` the changed words of a part by their old exponent, and to `sampled_E` a sample of all."""
    for block in range(0, words, BLOCK):
        here = uint64(2 * block)
        size = min(BLOCK, words - block)
        mask = uint64(0)
        if size == BLOCK:
            mask = differing(old + here, new + here)
        else:
            for i in range(size):
                at = here + uint64(2 * i)
                mask |= uint64(load16(old + at) != load16(new + at)) << uint64(i)
        while mask:
            at = here + uint64(2 * lowest(mask))
            mask &= mask - uint64(1)
            changed_E[(load16(old + at) & 0x7FFF) >> shift] += 1
        if block % (SAMPLED * BLOCK) == 0:
            for i in range(size):
                sampled_E[(load16(old + here + uint64(2 * i)) & 0x7FFF) >> shift] += 1


@compile_kernel
def load_words(source, size, words_W):
    """Return the address of a tile's words: `source`, or a copy in `words_W` of a tile that is not full."""
    if size == TILE:
        return source
    for i in range(size):
        words_W[i] = load16(source + uint64(2 * i))
    return uint64(words_W.ctypes.data)


@compile_kernel
def load_exponents(source, size, shift, exponents):
    for block in range((size + BLOCK - 1) // BLOCK):
        store_exponents(
            exponents + uint64(BLOCK * block), source + uint64(2 * BLOCK * block), shift
        )


@compile_kernel
def within(size, block):
    """Return the mask of the words of a block that belong to a tile of `size` words."""
    remaining = size - block * BLOCK
    return ~uint64(0) if remaining >= BLOCK else (uint64(1) << uint64(remaining)) - uint64(1)


@compile_kernel
def gather(old, new, words, shift, first_C, span_C, left_C, gaps, values, filled_C):
    """Append each class's gaps (members between two changes) and values to its place in `gaps` and `values`."""
    old_W, new_W = np.zeros(TILE, np.uint16), np.zeros(TILE, np.uint16)
    exponents_W, changed_B = np.zeros(TILE, np.uint8), np.zeros(BLOCK, np.uint64)
    exponents = uint64(exponents_W.ctypes.data)
    gap_C = np.zeros(len(first_C), np.int64)
    for tile in range(0, words, TILE):
        size = min(TILE, words - tile)
        here = load_words(old + uint64(2 * tile), size, old_W)
        there = load_words(new + uint64(2 * tile), size, new_W)
        load_exponents(here, size, shift, exponents)
        blocks = (size + BLOCK - 1) // BLOCK
        for block in range(blocks):
            mask = differing(here + uint64(2 * BLOCK * block), there + uint64(2 * BLOCK * block))
            changed_B[block] = mask & within(size, block)
        for c in range(len(first_C)):
            if left_C[c] == 0:
                continue
            gap, at = gap_C[c], filled_C[c]
            for block in range(blocks):
                mine = members(exponents + uint64(BLOCK * block), first_C[c], span_C[c]) & within(
                    size, block
                )
                hits = mine & changed_B[block]
                behind = int64(0)
                while hits:
                    bit = lowest(hits)
                    hits &= hits - uint64(1)
                    rank = ones(mine & ((uint64(1) << uint64(bit)) - uint64(1)))
                    gaps[at] = uint32(gap + rank - behind)
                    gap, behind = int64(0), rank + 1
                    word = uint64(2 * (block * BLOCK + bit))
                    change = (int64(load16(there + word)) - int64(load16(here + word))) & 0xFFFF
                    # Zigzag: 0, 1, 2, 3 stand for -1, 1, -2, 2; a change of 0 does not occur.
                    values[at] = uint16(
                        (2 * change if change < 0x8000 else 2 * (0x10000 - change) - 1) - 1
                    )
                    at += 1
                gap += ones(mine) - behind
            left_C[c] -= at - filled_C[c]
            gap_C[c], filled_C[c] = gap, at


@compile_kernel
def look_up_symbol(value):
    if value < 16:
        return int64(value)
    bits = int64(4)
    while value >> (bits + 1):
        bits += 1
    return 16 + 4 * (bits - 4) + ((value >> (bits - 2)) & 3)


@compile_kernel
def count_symbols(values, counts_S):
    for value in values:
        counts_S[look_up_symbol(int64(value))] += 1


@compile_kernel
def rice_bits(gaps, k):
    """Return the size in bits of gaps under the Golomb-Rice parameter `k`."""
    total = int64(0)
    for gap in gaps:
        quotient = int64(gap) >> k
        total += quotient + 1 + k if quotient < LONGEST_QUOTIENT else LONGEST_QUOTIENT + 32
    return total


@compile_kernel
def put(target, at, bits, size):
    address = target + uint64(at >> 3)
    store64(address, load64(address) | bits << uint64(at & 7))
    return at + size


@compile_kernel
def pack_gaps(gaps, values, counts_P, rice_P, out):
    """Write each gap and the low bits of its value into zeros; return the end in bits. Gaps come by part."""
    target = uint64(out.ctypes.data)
    at, i = int64(0), int64(0)
    for p in range(len(counts_P)):
        k = rice_P[p]
        for _ in range(counts_P[p]):
            gap, value = uint64(gaps[i]), int64(values[i])
            i += 1
            quotient = int64(gap >> uint64(k))
            if quotient < LONGEST_QUOTIENT:
                low = gap & ((uint64(1) << uint64(k)) - uint64(1))
                at = put(
                    target, at, (low << uint64(1) | uint64(1)) << uint64(quotient), quotient + 1 + k
                )
            else:
                at = put(target, at, gap << uint64(LONGEST_QUOTIENT), LONGEST_QUOTIENT + 32)
            symbol = look_up_symbol(value)
            if symbol >= 16:
                size = 2 + (symbol - 16) // 4
                at = put(
                    target, at, uint64(value) & ((uint64(1) << uint64(size)) - uint64(1)), size
                )
    return at


@compile_kernel
def pack_symbols(values, frequency_S, start_S, out):
    """Write the symbols by rANS, the last one first, from the end of `out`; return where they begin."""
    state = uint64(LOWEST_STATE)
    at = len(out)
    for i in range(len(values) - 1, -1, -1):
        symbol = look_up_symbol(int64(values[i]))
        frequency = uint64(frequency_S[symbol])
        if state >= frequency << uint64(32 - PROBABILITY_BITS):
            at -= 1
            out[at] = uint16(state & uint64(0xFFFF))
            state >>= uint64(16)
        state = (
            (state // frequency << uint64(PROBABILITY_BITS))
            + state % frequency
            + uint64(start_S[symbol])
        )
    out[at - 1] = uint16(state >> uint64(16))
    out[at - 2] = uint16(state & uint64(0xFFFF))
    return at - 2


# Inlined, as a call would return its pair through memory.
@njit(inline="always")
def next_gap(section, bits, k):
    """Return a gap, and the place in bits behind it."""
    window = load64(section + uint64(bits >> 3)) >> uint64(bits & 7)
    quotient = lowest(window | uint64(1) << uint64(LONGEST_QUOTIENT))
    if quotient < LONGEST_QUOTIENT:
        low = (window >> uint64(quotient + 1)) & ((uint64(1) << k) - uint64(1))
        return (quotient << int64(k)) | int64(low), bits + quotient + 1 + int64(k)
    return int64(
        (window >> uint64(LONGEST_QUOTIENT)) & uint64(0xFFFFFFFF)
    ), bits + LONGEST_QUOTIENT + 32


@compile_kernel
def patch_part(image, words, shift, first_C, span_C, left_C, rice_C, streams, undo, at):
    """Decode and patch one part; note what was there from `at`. Return the end, or -1 - end if it is malformed."""
    old_W, exponents_W = np.zeros(TILE, np.uint16), np.zeros(TILE, np.uint8)
    masks_B, ends_B = np.zeros(BLOCK, np.uint64), np.zeros(BLOCK, np.uint16)
    exponents, masks, ends = (
        uint64(exponents_W.ctypes.data),
        uint64(masks_B.ctypes.data),
        uint64(ends_B.ctypes.data),
    )
    rank_C = np.full(len(first_C), -1, np.int64)
    for tile in range(0, words, TILE):
        size = min(TILE, words - tile)
        here = load_words(image + uint64(2 * tile), size, old_W)
        load_exponents(here, size, shift, exponents)
        # Blocks behind the part's end hold no rank.
        ends_B[:] = 0xFFFF
        for c in range(len(first_C)):
            remaining = left_C[c]
            if remaining == 0:
                continue
            first, span, k = first_C[c], span_C[c], uint64(rice_C[c])
            total = int64(0)
            for block in range((size + BLOCK - 1) // BLOCK):
                mine = members(exponents + uint64(BLOCK * block), first, span) & within(size, block)
                store64(masks + uint64(8 * block), mine)
                total += ones(mine)
                store16(ends + uint64(2 * block), uint16(total))
            rank, bits, coded, state = (
                rank_C[c],
                streams.bits_C[c],
                streams.words_C[c],
                streams.state_C[c],
            )
            table = streams.tables + uint64(4 * SLOTS * c)
            if rank < 0:
                rank, bits = next_gap(streams.section, bits, k)
            while rank < total:
                # The block in which this member lies, and the member's place in it.
                block = uint64(not_above(ends, uint16(rank)))
                mine = load64(masks + uint64(8) * block)
                bit = select(mine, rank - int64(load16(ends + uint64(2) * block)) + ones(mine))
                position = uint64(BLOCK) * block + uint64(bit)
                # One step of rANS. Without a branch: whether the state needs words is close to random.
                entry = load32(table + ((state & uint64(SLOTS - 1)) << uint64(2)))
                state = uint64(((entry >> 12) & 0xFFF) + 1) * (
                    state >> uint64(PROBABILITY_BITS)
                ) + uint64(entry & 0xFFF)
                low = uint64(state < uint64(LOWEST_STATE))
                word = uint64(load16(streams.section + uint64(coded))) & (uint64(0) - low)
                state = state << (low << uint64(4)) | word
                coded += int64(low << uint64(1))
                value = int64(entry >> 24)
                if value >= 16:
                    more = uint64(2 + ((value - 16) >> 2))
                    window = load64(streams.section + uint64(bits >> 3)) >> uint64(bits & 7)
                    value = int64(
                        (uint64(4 + (value & 3)) << more)
                        | (window & ((uint64(1) << more) - uint64(1)))
                    )
                    bits += int64(more)
                change = ((value + 1) >> 1) ^ -((value + 1) & 1)
                before = load16(here + uint64(2) * position)
                position += uint64(tile)
                store32(undo.positions + uint64(4 * at), uint32(position))
                store16(undo.words + uint64(2 * at), before)
                store16(image + uint64(2) * position, uint16(int64(before) + change))
                at += 1
                remaining -= 1
                if remaining == 0:
                    break
                gap, bits = next_gap(streams.section, bits, k)
                rank += gap + 1
            # Only here: a tile reads at most 4096 changes, of 9 bytes each, past the end, and the padding is longer.
            if bits > streams.bits_end_C[c] or coded > streams.words_end_C[c]:
                return int64(-1 - at)
            rank_C[c], streams.bits_C[c], streams.words_C[c], streams.state_C[c] = (
                rank - total,
                bits,
                coded,
                state,
            )
            left_C[c] = remaining
    return int64(-1 - at if left_C.any() else at)


@compile_kernel
def patch_section(
    image, offset_P, words_P, shift_P, first_C, span_C, counts_PC, rice_PC, streams, undo, end_P
):
    """Decode and patch all parts; return whether they are well-formed. `end_P` gets the ends of parts in `undo`."""
    at = int64(0)
    for p in range(len(offset_P)):
        start = image + uint64(offset_P[p])
        at = patch_part(
            start,
            words_P[p],
            uint16(shift_P[p]),
            first_C,
            span_C,
            counts_PC[p],
            rice_PC[p],
            streams,
            undo,
            at,
        )
        if at < 0:
            end_P[p:] = -1 - at
            return False
        end_P[p] = at
    for c in range(len(first_C)):
        unread = streams.bits_end_C[c] - streams.bits_C[c]
        if (
            streams.state_C[c] != LOWEST_STATE
            or streams.words_C[c] != streams.words_end_C[c]
            or unread >= 8
        ):
            return False
    return True


@compile_kernel
def restore(image, offset_P, end_P, undo):
    """Take back what `patch_section` wrote."""
    at = int64(0)
    for p in range(len(offset_P)):
        for i in range(at, end_P[p]):
            address = uint64(offset_P[p]) + uint64(2) * uint64(
                load32(undo.positions + uint64(4 * i))
            )
            store16(image + address, load16(undo.words + uint64(2 * i)))
        at = end_P[p]


@compile_kernel
def read_varints(data, at, limit, out):
    """Fill `out` with LEB128 integers of less than 2^56; return the end, or -1 if they are malformed."""
    for i in range(len(out)):
        value, shift = int64(0), int64(0)
        while True:
            if at >= limit or shift > 49:
                return int64(-1)
            byte = int64(data[at])
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        out[i] = value
    return int64(at)
