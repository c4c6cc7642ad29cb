"""A decoder of changes from PROTOCOL.md, section Changes, alone: slow, and without a line of the codec."""

import struct
from itertools import count

import numpy as np
import xxhash

Array = np.ndarray


class Bits:
    """A stream of bits, beginning with the lowest bit of each byte."""

    def __init__(self, data: bytes) -> None:
        self.number, self.left = int.from_bytes(data, "little"), 8 * len(data)

    def read(self, size: int) -> int:
        assert size <= self.left
        value = self.number & ((1 << size) - 1)
        self.number >>= size
        self.left -= size
        return value

    def gap(self, rice: int) -> int:
        for quotient in range(24):
            if self.read(1):
                return (quotient << rice) + self.read(rice)
        return self.read(32)


class Symbols:
    def __init__(self, words: list[int], frequency: dict[int, int]) -> None:
        self.words, self.frequency = words[2:], frequency
        self.x = words[0] + 65536 * words[1]
        assert sum(frequency.values()) == 1024

    def read(self) -> int:
        slot, start = self.x % 1024, 0
        for symbol in sorted(self.frequency):
            if slot < start + self.frequency[symbol]:
                break
            start += self.frequency[symbol]
        self.x = self.frequency[symbol] * (self.x // 1024) + slot - start
        if self.x < 65536:
            self.x = 65536 * self.x + self.words.pop(0)
        return symbol


class Integers:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def read(self) -> int:
        value = 0
        for shift in count(0, 7):
            byte = self.data[self.at]
            self.at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise AssertionError


def apply(base: bytes, changes: bytes) -> bytes:
    """Return the file that the changes make of the file `base`."""
    magic, digest, header, size, sections = struct.unpack_from("<4s16s16sQI", changes)
    assert (
        magic == b"HZC1" and digest == xxhash.xxh3_128(changes[20:]).digest() and size == len(base)
    )
    length = struct.unpack_from("<Q", base)[0]
    assert header == xxhash.xxh3_128(base[: 8 + length]).digest()
    image = bytearray(base)
    at = 48
    for _ in range(sections):
        length = struct.unpack_from("<Q", changes, at)[0]
        section(base, changes[at + 8 : at + 8 + length], image)
        at += 8 + length
    assert at == len(changes)
    return bytes(image)


def section(base: bytes, data: bytes, image: bytearray) -> None:
    head = Integers(data)
    classes = []
    for _ in range(head.read()):
        shift, first, last, gap_bytes, value_words, symbols = (head.read() for _ in range(6))
        classes.append(
            (
                shift,
                first,
                last,
                gap_bytes,
                value_words,
                {head.read(): head.read() for _ in range(symbols)},
            )
        )
    parts = []
    end = 0
    for _ in range(head.read()):
        offset = end + head.read()
        words, shift = head.read(), head.read()
        counts, rices = ([head.read() for _ in classes] for _ in range(2))
        parts.append((offset, words, shift, counts, rices))
        end = offset + 2 * words
    for _ in range(head.read()):
        offset = head.read()
        image[offset] = head.read()
    at = head.at
    for c, (shift, first, last, gap_bytes, value_words, frequency) in enumerate(classes):
        bits = Bits(data[at : at + gap_bytes])
        at += gap_bytes
        symbols = Symbols(list(struct.unpack_from(f"<{value_words}H", data, at)), frequency)
        at += 2 * value_words
        for offset, words, part_shift, counts, rices in parts:
            assert part_shift == shift or not counts[c]
            old = np.frombuffer(base, "<u2", words, offset)
            exponents = (old & 0x7FFF) >> shift
            members = np.flatnonzero((exponents >= first) & (exponents <= last))
            member = -1
            for _ in range(counts[c]):
                member += 1 + bits.gap(rices[c])
                symbol = symbols.read()
                value = symbol
                if symbol >= 16:
                    n = 2 + (symbol - 16) // 4
                    value = ((4 + symbol % 4) << n) + bits.read(n)
                z = value + 1
                change = z // 2 if z % 2 == 0 else -(z + 1) // 2
                position = int(members[member])
                new = (int(old[position]) + change) % 65536
                struct.pack_into("<H", image, offset + 2 * position, new)
        assert symbols.x == 65536 and not symbols.words and bits.left < 8
    assert at == len(data)
