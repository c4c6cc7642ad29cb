"""From changes to the patched image, or to the image as it was."""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import xxhash

from horizonrl.broker.weights import kernels
from horizonrl.broker.weights.envelope import DIGESTED, ENVELOPE, LENGTH, MAGIC
from horizonrl.broker.weights.layout import Array, Bytes, Layout
from horizonrl.broker.weights.section import Head, read_head
from horizonrl.common.errors import WeightsRejected

PADDING = 1 << 16
"""Readable bytes behind a section: how far malformed streams may be read before that is noticed."""


class ReadSection(NamedTuple):
    head: Head
    data: Array
    """All of its bytes, and at least PADDING readable ones behind them."""
    streams_at: int


def read_sections(layout: Layout, data: Bytes) -> list[ReadSection]:
    """Return the sections, with all that can be checked without decoding checked. Raises WeightsRejected."""
    if len(data) < ENVELOPE.size:
        raise WeightsRejected(f"{len(data)} bytes are no changes")
    magic, digest, header_digest, image_bytes, count = ENVELOPE.unpack_from(data.data)
    if magic != MAGIC or digest != xxhash.xxh3_128_digest(data[DIGESTED:].data):
        raise WeightsRejected("the changes are damaged: their digest does not match")
    if header_digest != layout.header_digest or image_bytes != layout.image_bytes:
        raise WeightsRejected("the changes are those of an image with another header")
    sections = []
    padded = np.concatenate([data, np.zeros(PADDING, np.uint8)])  # once: sections are views
    at = ENVELOPE.size
    for _ in range(count):
        length = (
            LENGTH.unpack_from(data.data, at)[0] if at + LENGTH.size <= len(data) else len(data)
        )
        at += LENGTH.size
        if length > len(data) - at:
            raise WeightsRejected("a section is longer than the changes")
        section = padded[at : at + length + PADDING]
        head, streams_at = read_head(section, length, layout.data_offset, layout.image_bytes)
        sections.append(ReadSection(head, section, streams_at))
        at += length
    if at != len(data):
        raise WeightsRejected(f"{len(data) - at} bytes follow the last section")
    _check_disjoint(sections)
    return sections


def _check_disjoint(sections: list[ReadSection]) -> None:
    starts = np.concatenate(
        [[], *(s.head.offset_P for s in sections), *([o for o, _ in s.head.odd] for s in sections)]
    )
    ends = np.concatenate(
        [[], *(s.head.offset_P + 2 * s.head.words_P for s in sections)]
        + [[o + 1 for o, _ in s.head.odd] for s in sections]
    )
    order = np.argsort(starts, kind="stable")
    if (ends[order][:-1] > starts[order][1:]).any():
        raise WeightsRejected("two parts of the changes overlap")


def patch(image: Bytes, sections: list[ReadSection]) -> list[tuple[int, Array]]:
    """Patch the image; return, for each part, its offset, and which of its words changed, in no order.

    Raises WeightsRejected if a stream is malformed: then the image is as it was.
    """
    done: list[tuple[ReadSection, Array, kernels.Undo, list[Array]]] = []
    for section in sections:
        head = section.head
        total = int(head.counts_PC.sum())
        before: list[Array] = [np.empty(total, np.uint32), np.empty(total, np.uint16)]
        undo = kernels.Undo(*(np.uint64(array.ctypes.data) for array in before))
        end_P = np.zeros(len(head.offset_P), np.int64)
        done.append((section, end_P, undo, before))
        if not _patch_section(image, section, undo, end_P):
            for patched, end_P, undo, _ in done:
                kernels.restore(_address(image), patched.head.offset_P, end_P, undo)
            raise WeightsRejected(
                "the changes are malformed, or of other weights: the image stays as it was"
            )
    # Last, as nothing can fail behind it.
    for section in sections:
        for offset, value in section.head.odd:
            image[offset] = value
    return [
        (int(offset), before[0][start:end])
        for section, end_P, _, before in done
        for offset, (start, end) in zip(section.head.offset_P, pairwise([0, *end_P]), strict=True)
    ]


def _patch_section(image: Bytes, section: ReadSection, undo: kernels.Undo, end_P: Array) -> bool:
    head = section.head
    lengths = [(group.gap_bytes, 2 * group.value_words) for group in head.classes]
    ends = section.streams_at + np.cumsum(np.array(lengths, np.int64).reshape(-1)).reshape(-1, 2)
    starts = ends - np.array(lengths, np.int64).reshape(-1, 2)
    # A stream of symbols begins with the state, of two words.
    state_C = np.array(
        [int(section.data[start : start + 4].view("<u4")[0]) for start in starts[:, 1]], np.uint64
    )
    tables = np.array([_table(group.frequency_S) for group in head.classes], np.uint32)
    streams = kernels.Streams(
        section=_address(section.data),
        bits_C=8 * starts[:, 0],
        bits_end_C=8 * ends[:, 0],
        words_C=starts[:, 1] + 4,
        words_end_C=ends[:, 1].copy(),
        state_C=state_C,
        tables=_address(tables),
    )
    first_C = np.array([group.first for group in head.classes], np.uint8)
    span_C = np.array([group.last - group.first for group in head.classes], np.uint8)
    columns = (
        head.offset_P,
        head.words_P.copy(),
        head.shift_P.copy(),
        first_C,
        span_C,
        head.counts_PC.copy(),
    )
    return bool(
        kernels.patch_section(_address(image), *columns, head.rice_PC, streams, undo, end_P)
    )


def _table(frequency_S: Array) -> Array:
    """Return what each slot of a state means: symbol << 24 | frequency - 1 << 12 | place of the slot in its symbol."""
    symbol_M = np.repeat(np.arange(len(frequency_S)), frequency_S)
    place_M = (
        np.arange(1 << kernels.PROBABILITY_BITS) - (np.cumsum(frequency_S) - frequency_S)[symbol_M]
    )
    table_M: Array = symbol_M << 24 | frequency_S[symbol_M] - 1 << 12 | place_M
    return table_M


def _address(data: Array) -> np.uint64:
    return np.uint64(data.ctypes.data)
