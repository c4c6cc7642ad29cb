"""The loops of the change codec, compiled by numba: `changes.py` calls them, and checks what they are given.

Place in the flow: inside `changes.py`. Data is passed by address, so that read-only, mapped and unaligned buffers all
run the same machine code. A block is 64 words of 16 bits; a mask has one bit for each of its words. A class is the
words whose old magnitude (without the sign) lies in a range, so the members of a class in a block are two comparisons
of a vector register. All loops release the GIL.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

from typing import Any

import numpy as np
from llvmlite import ir
from numba import int64, njit, uint16, uint32, uint64
from numba.core import types
from numba.extending import intrinsic

BLOCK = 64
TILE = 8192
"""Words that stay in the first-level cache (16 KB) while every class looks at them."""
PROBABILITY_BITS = 12
TOTAL = 1 << PROBABILITY_BITS
SYMBOLS = 64
"""Of a change: 0 to 15 are the change itself; above, a symbol stands for its leading bits and the rest is sent as it is."""
LONGEST_QUOTIENT = 24
"""A gap with a larger Golomb-Rice quotient is sent as 32 bits after this many zeros: 56 bits are read at once."""
LOWEST_STATE = 1 << 16
"""Of the range coder: states are in [2^16, 2^32), and leave or take 16 bits at a time."""

_I16, _I64 = ir.IntType(16), ir.IntType(64)


def _vector(builder: Any, address: Any) -> Any:
    """Load a block; the address need not be aligned."""
    load = builder.load(builder.inttoptr(address, ir.VectorType(_I16, BLOCK).as_pointer()))
    load.align = 1
    return load


def _splat(builder: Any, value: Any) -> Any:
    vector = ir.VectorType(_I16, BLOCK)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(
        first, ir.Constant(vector, ir.Undefined), ir.Constant(ir.VectorType(ir.IntType(32), BLOCK), [0] * BLOCK)
    )


@intrinsic
def members(_context, address, low, width):
    """Return the mask of the words of a block whose magnitude is in [low, low + width)."""

    def generate(context, builder, signature, arguments):
        vector = ir.VectorType(_I16, BLOCK)
        magnitude = builder.and_(_vector(builder, arguments[0]), ir.Constant(vector, [0x7FFF] * BLOCK))
        above = builder.sub(magnitude, _splat(builder, arguments[1]))
        return builder.bitcast(builder.icmp_unsigned("<", above, _splat(builder, arguments[2])), _I64)

    return uint64(types.uint64, types.uint16, types.uint16), generate


@intrinsic
def differing(_context, old, new):
    """Return the mask of the words in which two blocks differ."""

    def generate(context, builder, signature, arguments):
        pair = [_vector(builder, address) for address in arguments]
        return builder.bitcast(builder.icmp_unsigned("!=", *pair), _I64)

    return uint64(types.uint64, types.uint64), generate


def _loader(kind: Any, width: int) -> Any:
    @intrinsic
    def load(_context, address):
        def generate(context, builder, signature, arguments):
            value = builder.load(builder.inttoptr(arguments[0], ir.IntType(width).as_pointer()))
            value.align = 1
            return value

        return kind(types.uint64), generate

    return load


def _storer(kind: Any, width: int) -> Any:
    @intrinsic
    def store(_context, address, value):
        def generate(context, builder, signature, arguments):
            builder.store(arguments[1], builder.inttoptr(arguments[0], ir.IntType(width).as_pointer()), align=1)
            return context.get_dummy_value()

        return types.void(types.uint64, kind), generate

    return store


load16, load64 = _loader(types.uint16, 16), _loader(types.uint64, 64)
store16, store64 = _storer(types.uint16, 16), _storer(types.uint64, 64)


@intrinsic
def ones(_context, value):
    """Return the number of bits that are set."""

    def generate(context, builder, signature, arguments):
        return builder.ctpop(arguments[0])

    return int64(types.uint64), generate


@intrinsic
def lowest(_context, value):
    """Return the index of the lowest bit that is set; 64 of none."""

    def generate(context, builder, signature, arguments):
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return int64(types.uint64), generate


def compiled(function: Any) -> Any:
    try:
        return njit(cache=True, nogil=True, boundscheck=False)(function)
    except RuntimeError:  # no folder that can be written to for the machine code: it is made anew in each process
        return njit(nogil=True, boundscheck=False)(function)


@compiled
def count_changes(old, new, words, shift, changed_E, members_E):
    """Add to `changed_E` the changes of a part by exponent, and to `members_E` a sample of its words, 1 block of 16."""
    for block in range(0, words, BLOCK):
        here = uint64(2 * block)
        size = min(BLOCK, words - block)
        if size == BLOCK:
            mask = differing(old + here, new + here)
        else:
            mask = uint64(0)
            for i in range(size):
                at = here + uint64(2 * i)
                mask |= uint64(load16(old + at) != load16(new + at)) << uint64(i)
        while mask:
            at = here + uint64(2 * lowest(mask))
            mask &= mask - uint64(1)
            changed_E[(load16(old + at) & 0x7FFF) >> shift] += 1
        if block % (16 * BLOCK) == 0:
            for i in range(size):
                members_E[(load16(old + here + uint64(2 * i)) & 0x7FFF) >> shift] += 1


@compiled
def gather(old, new, words, low_C, width_C, left_C, gaps, values, filled_C):
    """Append each class's gaps (members between two changes) and values to its place in `gaps` and `values`."""
    classes = len(low_C)
    tail = np.zeros(2 * BLOCK, np.uint8)
    changed = np.empty(TILE // BLOCK, np.uint64)
    gap_C = np.zeros(classes, np.int64)
    for tile in range(0, words, TILE):
        size = min(TILE, words - tile)
        full = size // BLOCK
        rest = size - full * BLOCK
        here = old + uint64(2 * tile)
        there = new + uint64(2 * tile)
        any_changed = uint64(0)
        for block in range(full):
            changed[block] = differing(here + uint64(2 * BLOCK * block), there + uint64(2 * BLOCK * block))
        if rest:
            mask = uint64(0)
            for i in range(rest):
                at = uint64(2 * (full * BLOCK + i))
                store16(uint64(tail.ctypes.data) + uint64(2 * i), load16(here + at))
                mask |= uint64(load16(here + at) != load16(there + at)) << uint64(i)
            changed[full] = mask
        for c in range(classes):
            if left_C[c] == 0:
                continue
            low, width = low_C[c], width_C[c]
            gap, at, left = gap_C[c], filled_C[c], left_C[c]
            for block in range(full + (rest > 0)):
                if block < full:
                    mine = members(here + uint64(2 * BLOCK * block), low, width)
                else:
                    mine = members(uint64(tail.ctypes.data), low, width) & ((uint64(1) << uint64(rest)) - uint64(1))
                hits = mine & changed[block]
                before = int64(0)
                while hits:
                    bit = lowest(hits)
                    hits &= hits - uint64(1)
                    rank = ones(mine & ((uint64(1) << uint64(bit)) - uint64(1)))
                    gaps[at] = uint32(gap + rank - before)
                    gap = int64(0)
                    before = rank + 1
                    word = uint64(2 * (block * BLOCK + bit))
                    change = (int64(load16(there + word)) - int64(load16(here + word))) & 0xFFFF
                    # Zigzag: 0, 1, 2, 3 stand for -1, 1, -2, 2; the change 0 does not occur.
                    zigzag = 2 * change if change < 0x8000 else 2 * (0x10000 - change) - 1
                    values[at] = uint16(zigzag - 1)
                    at += 1
                    left -= 1
                gap += ones(mine) - before
            gap_C[c], filled_C[c], left_C[c] = gap, at, left


@compiled
def symbol_of(value):
    if value < 16:
        return int64(value)
    bits = int64(4)
    while value >> (bits + 1):
        bits += 1
    return 16 + 4 * (bits - 4) + ((value >> (bits - 2)) & 3)


@compiled
def count_symbols(values, counts_S):
    for value in values:
        counts_S[symbol_of(int64(value))] += 1


@compiled
def pack_bits(gaps, values, first_P, k_P, out):
    """Write gaps and low bits of values; part p's gaps begin at first_P[p] and have the Rice parameter k_P[p]."""
    base = uint64(out.ctypes.data)
    at = int64(0)
    for p in range(len(k_P)):
        k = k_P[p]
        for i in range(first_P[p], first_P[p + 1]):
            gap = uint64(gaps[i])
            quotient = int64(gap >> uint64(k))
            if quotient < LONGEST_QUOTIENT:
                bits = ((gap & ((uint64(1) << uint64(k)) - uint64(1))) << uint64(1) | uint64(1)) << uint64(quotient)
                size = quotient + 1 + k
            else:
                bits = gap << uint64(LONGEST_QUOTIENT)
                size = LONGEST_QUOTIENT + 32
            place = base + uint64(at >> 3)
            store64(place, load64(place) | bits << uint64(at & 7))
            at += size
            symbol = symbol_of(int64(values[i]))
            if symbol >= 16:
                size = 2 + (symbol - 16) // 4
                bits = uint64(values[i]) & ((uint64(1) << uint64(size)) - uint64(1))
                place = base + uint64(at >> 3)
                store64(place, load64(place) | bits << uint64(at & 7))
                at += size
    return at


@compiled
def rice_bits(gaps, k):
    """Return the size in bits of gaps under the parameter `k`."""
    total = int64(0)
    for gap in gaps:
        quotient = int64(gap) >> k
        total += quotient + 1 + k if quotient < LONGEST_QUOTIENT else LONGEST_QUOTIENT + 32
    return total


@compiled
def pack_symbols(values, frequency_S, start_S, out):
    """Write the symbols of values from the last to the first, from the end of `out`; return where they begin."""
    state = uint64(LOWEST_STATE)
    at = len(out)
    for i in range(len(values) - 1, -1, -1):
        symbol = symbol_of(int64(values[i]))
        frequency = uint64(frequency_S[symbol])
        if state >= frequency << uint64(32 - PROBABILITY_BITS):
            at -= 1
            out[at] = uint16(state & uint64(0xFFFF))
            state >>= uint64(16)
        state = (state // frequency << uint64(PROBABILITY_BITS)) + state % frequency + uint64(start_S[symbol])
    out[at - 1] = uint16(state >> uint64(16))
    out[at - 2] = uint16(state & uint64(0xFFFF))
    return at - 2


@compiled
def unpack(
    old,
    words,
    low_C,
    width_C,
    left_C,
    k_C,
    bits_C,
    bits_end_C,
    coded_C,
    coded_end_C,
    state_C,
    table_CM,
    stream,
    positions,
    news,
    at,
):
    """Decode one part: fill `positions` (within the part) and `news` from `at`; return the end, or -1 if malformed.

    `stream` is the address of the section, with 8 readable bytes behind it; `bits_C` are places in it in bits, and
    `coded_C` in bytes. A row of `table_CM` has for each of the 4096 slots symbol << 24 | frequency - 1 << 12 | offset.
    """
    classes = len(low_C)
    tail = np.zeros(2 * BLOCK, np.uint8)
    gap_C = np.zeros(classes, np.int64)
    for c in range(classes):
        if left_C[c]:
            gap_C[c] = -1
    one = uint64(1)
    for tile in range(0, words, TILE):
        size = min(TILE, words - tile)
        full = size // BLOCK
        rest = size - full * BLOCK
        here = old + uint64(2 * tile)
        for i in range(rest):
            store16(uint64(tail.ctypes.data) + uint64(2 * i), load16(here + uint64(2 * (full * BLOCK + i))))
        for c in range(classes):
            left = left_C[c]
            if left == 0:
                continue
            low, width, k = low_C[c], width_C[c], uint64(k_C[c])
            gap, bits, coded, state = gap_C[c], bits_C[c], coded_C[c], state_C[c]
            bits_end, coded_end = bits_end_C[c], coded_end_C[c]
            fresh = gap < 0
            for block in range(full + (rest > 0)):
                if block < full:
                    mine = members(here + uint64(2 * BLOCK * block), low, width)
                else:
                    mine = members(uint64(tail.ctypes.data), low, width) & ((one << uint64(rest)) - one)
                count = ones(mine)
                while True:
                    if fresh:
                        window = load64(stream + uint64(bits >> 3)) >> uint64(bits & 7)
                        quotient = lowest(window | one << uint64(LONGEST_QUOTIENT))
                        if quotient < LONGEST_QUOTIENT:
                            gap = (quotient << int64(k)) | int64((window >> uint64(quotient + 1)) & ((one << k) - one))
                            bits += quotient + 1 + int64(k)
                        else:
                            gap = int64((window >> uint64(LONGEST_QUOTIENT)) & uint64(0xFFFFFFFF))
                            bits += LONGEST_QUOTIENT + 32
                        if bits > bits_end:
                            return -1
                        fresh = False
                    if gap >= count:
                        gap -= count
                        break
                    for _ in range(gap):
                        mine &= mine - one
                    bit = lowest(mine)
                    mine &= mine - one
                    count -= gap + 1
                    entry = table_CM[c, state & uint64(TOTAL - 1)]
                    state = uint64(((entry >> 12) & 0xFFF) + 1) * (state >> uint64(PROBABILITY_BITS)) + uint64(
                        entry & 0xFFF
                    )
                    if state < uint64(LOWEST_STATE):
                        if coded >= coded_end:
                            return -1
                        state = state << uint64(16) | uint64(load16(stream + uint64(coded)))
                        coded += 2
                    value = int64(entry >> 24)
                    if value >= 16:
                        extra = 2 + ((value - 16) >> 2)
                        window = load64(stream + uint64(bits >> 3)) >> uint64(bits & 7)
                        value = int64(
                            (uint64(4 + (value & 3)) << uint64(extra)) | (window & ((one << uint64(extra)) - one))
                        )
                        bits += extra
                        if bits > bits_end:
                            return -1
                    zigzag = value + 1
                    change = (zigzag >> 1) ^ -(zigzag & 1)
                    if block < full:
                        word = load16(here + uint64(2 * (block * BLOCK + bit)))
                    else:
                        word = load16(uint64(tail.ctypes.data) + uint64(2 * bit))
                    positions[at] = uint32(tile + block * BLOCK + bit)
                    news[at] = uint16(int64(word) + change)
                    at += 1
                    left -= 1
                    if left == 0:
                        break
                    fresh = True
                if left == 0:
                    break
            gap_C[c], bits_C[c], coded_C[c], state_C[c], left_C[c] = gap, bits, coded, state, left
    for c in range(classes):
        if left_C[c]:
            return -1
    return at


@compiled
def patch(target, positions, news):
    for i in range(len(positions)):
        store16(target + uint64(2) * uint64(positions[i]), news[i])
