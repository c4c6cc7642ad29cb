"""Changes make the new image bit for bit, are as small as they should be, and do no harm whatever they hold."""

import json
import struct
import tracemalloc
from collections.abc import Mapping
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from numba.core.dispatcher import Dispatcher

from horizonrl.broker.weights import changes as changes_module
from horizonrl.broker.weights import encoding, kernels
from horizonrl.broker.weights.changes import (
    Part,
    apply_changes,
    decode_changes,
    encode_changes,
    encode_section,
    join_sections,
    read_layout,
    warm_up,
    warm_up_in_thread,
)
from horizonrl.broker.weights.envelope import ENVELOPE
from horizonrl.common.errors import WeightsRejected
from tests.broker.weights import reference

Array = np.ndarray
BYTES = {"BF16": 2, "F16": 2, "F32": 4, "I64": 8, "U8": 1}
SPECIAL = np.array(
    [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC1, 0xFFC1, 0x0001, 0x8001, 0x7FFF, 0xFFFF], np.uint16
)
"""Both zeros, both infinities, two NaNs, denormals, and words of ones."""


def image(tensors: Mapping[str, tuple[str, bytes]]) -> bytes:
    """Return a safetensors file of flat tensors."""
    header, at = {}, 0
    for name, (dtype, data) in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": [len(data) // BYTES[dtype]],
            "data_offsets": [at, at + len(data)],
        }
        at += len(data)
    head = json.dumps(header).encode()
    return len(head).to_bytes(8, "little") + head + b"".join(data for _, data in tensors.values())


def bfloat16(values: Array) -> Array:
    """Return float32 values rounded to bfloat16, to the nearest and to even, as words."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def trained(size: int, rate: float, seed: int = 0) -> tuple[Array, Array]:
    """Return weights before and after a step of Adam's size at this learning rate."""
    random = np.random.default_rng(seed)
    weights = random.normal(0, 0.05, size).astype(np.float32)
    return bfloat16(weights), bfloat16(weights + random.normal(0, rate, size).astype(np.float32))


def pair(old: Array, new: Array, dtype: str = "BF16") -> tuple[bytes, bytes]:
    return image({"w": (dtype, old.tobytes())}), image({"w": (dtype, new.tobytes())})


def check(base: bytes, new: bytes) -> bytes:
    """Check that codec and reference make `new` of `base`; return the changes."""
    changes = encode_changes(base, new)
    patched = bytearray(base)
    apply_changes(patched, changes)
    assert bytes(patched) == new
    assert reference.apply(base, changes) == new
    return changes


@st.composite
def images(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """Draw two images of equal header, of all types, with few, many or no changes."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    old, new = {}, {}
    for index in range(draw(st.integers(0, 4))):
        dtype = draw(st.sampled_from(sorted(BYTES)))
        size = BYTES[dtype] * draw(st.sampled_from([0, 1, 2, 63, 64, 65, 700, 4096, 4097, 9000]))
        before = bfloat16(random.normal(0, 0.02, size // 2 + 1)) if draw(st.booleans()) else None
        words = (
            random.integers(0, 1 << 16, size // 2 + 1).astype(np.uint16)
            if before is None
            else before
        )
        after = words.copy()
        touched = random.random(len(words)) < draw(st.sampled_from([0.0, 0.003, 0.1, 0.9, 1.0]))
        step = draw(st.sampled_from([1, 2, 40, 1 << 15]))
        after[touched] += random.integers(-step, step + 1, touched.sum()).astype(np.uint16)
        places = random.integers(0, len(words), draw(st.integers(0, 5)))
        (after if draw(st.booleans()) else words)[places] = random.choice(SPECIAL, len(places))
        old[f"t{index}"], new[f"t{index}"] = (
            (dtype, each.tobytes()[:size]) for each in (words, after)
        )
    return image(old), image(new)


@given(images())
def test_changes_make_the_new_image_bit_for_bit_and_so_does_the_page(
    both: tuple[bytes, bytes],
) -> None:
    check(*both)


@pytest.mark.parametrize("words", [1, 64, 4095, 4096, 4097, 50_000])
def test_everything_may_change_between_any_two_words(words: int) -> None:
    random = np.random.default_rng(words)
    old, new = (random.integers(0, 1 << 16, words).astype(np.uint16) for _ in range(2))
    # Noise costs its 16 bits, a bit for being next, and the head.
    assert len(check(*pair(old, new))) < 2.3 * words + 1500


def test_each_special_word_becomes_each_other_one() -> None:
    old, new = (each.ravel().copy() for each in np.meshgrid(SPECIAL, SPECIAL))
    for dtype in ("BF16", "F16", "F32"):
        check(*pair(old, new, dtype))


def test_no_change_and_no_tensor_take_hardly_a_byte() -> None:
    old, _ = trained(10_000, 1e-5)
    assert len(check(*pair(old, old))) < 70
    assert len(check(image({}), image({}))) < 70


def test_a_lone_change_far_into_a_tensor_is_found() -> None:
    old = np.full(3_000_000, 0x3F80, np.uint16)
    new = old.copy()
    new[[0, 1, 2_999_999]] += 1
    check(*pair(old, new))


def test_tied_heads_change_both_or_one() -> None:
    old, new = trained(20_000, 4e-5)
    for other in (new, old):
        tensors = (
            (("BF16", old.tobytes()), ("BF16", old.tobytes())),
            (("BF16", new.tobytes()), ("BF16", other.tobytes())),
        )
        check(*(image({"embed": first, "head": second}) for first, second in tensors))


@pytest.mark.parametrize("rate", [1e-6, 1e-5, 4e-5])
def test_changes_are_within_a_tenth_of_their_entropy(rate: float) -> None:
    old, new = trained(4_000_000, rate)
    exponent = (old & 0x7FFF) >> 7
    change = (new - old).astype(np.int16)
    bits = 0.0
    for each in np.unique(exponent):
        mine = change[exponent == each]
        _, counts = np.unique(mine, return_counts=True)
        bits -= (counts * np.log2(counts / len(mine))).sum()
    base, target = pair(old, new)
    changes = encode_changes(base, target)
    patched = bytearray(base)
    apply_changes(patched, changes)
    assert bytes(patched) == target
    assert len(changes) < 1.1 * bits / 8


def test_versions_that_were_skipped_are_their_changes_in_order() -> None:
    random = np.random.default_rng(5)
    weights = random.normal(0, 0.05, 30_000).astype(np.float32)
    frames = []
    for _ in range(11):
        frames.append(image({"w": ("BF16", bfloat16(weights).tobytes())}))
        weights += random.normal(0, 1e-4, len(weights)).astype(np.float32)
    patched = bytearray(frames[0])
    for base, new in pairwise(frames):
        apply_changes(patched, encode_changes(base, new))
    assert bytes(patched) == frames[-1]


def sliced(base: bytes, new: bytes, ranks: int) -> list[bytes]:
    """Return a section for each rank, which has its share of each tensor."""
    layout = read_layout(base)
    sections = []
    for rank in range(ranks):
        parts = []
        for place in layout.tensors.values():
            share = -(-(place.size_bytes // 2) // ranks) * 2
            start = min(rank * share, place.size_bytes)
            end = place.size_bytes if rank == ranks - 1 else min(start + share, place.size_bytes)
            start, end = place.offset + start, place.offset + end
            parts.append(Part(start, place.dtype, base[start:end], new[start:end]))
        sections.append(encode_section(reversed(parts)))
    return sections


@settings(max_examples=25)
@given(images(), st.integers(1, 5), st.randoms())
def test_ranks_encode_their_slices_and_the_sections_are_joined_in_any_order(
    both: tuple[bytes, bytes],
    ranks: int,
    random: Random,
) -> None:
    base, new = both
    sections = sliced(base, new, ranks)
    random.shuffle(sections)
    changes = join_sections(read_layout(base), sections)
    patched = bytearray(base)
    apply_changes(patched, changes)
    assert bytes(patched) == new == reference.apply(base, changes)


def test_a_tensor_of_more_words_than_a_part_may_have_is_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(encoding, "MOST_WORDS", 1000)
    check(*pair(*trained(5_500, 1e-4)))


def test_a_large_image_is_encoded_in_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes_module, "SECTION_BYTES", 10_000)
    both = (each.reshape(5, 6_000) for each in trained(30_000, 1e-4))
    data = check(
        *(image({f"t{n}": ("BF16", row.tobytes()) for n, row in enumerate(rows)}) for rows in both)
    )
    assert ENVELOPE.unpack_from(data)[4] == 5


def test_images_with_different_headers_have_no_changes() -> None:
    words = np.zeros(4, np.uint16).tobytes()
    with pytest.raises(WeightsRejected, match="key frame"):
        encode_changes(image({"a": ("BF16", words)}), image({"b": ("BF16", words)}))
    changes = encode_changes(*[image({"a": ("BF16", words)})] * 2)
    with pytest.raises(WeightsRejected, match="another header"):
        apply_changes(bytearray(image({"b": ("BF16", words)})), changes)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 7,
        b"\xff" * 40,
        b"\x05\0\0\0\0\0\0\0{",
        b"\x02\0\0\0\0\0\0\0[]",
        b"\x02\0\0\0\0\0\0\0{}",
    ],
)
def test_what_is_no_image_has_no_changes(data: bytes) -> None:
    changes = encode_changes(*pair(*trained(100, 1e-3)))
    with pytest.raises(WeightsRejected):
        apply_changes(bytearray(data), changes)


def test_a_read_only_image_is_not_touched() -> None:
    base, new = pair(*trained(100, 1e-3))
    with pytest.raises(TypeError, match="read-only"):
        apply_changes(base, encode_changes(base, new))


# ---- damage and malice


def signed(body: bytes) -> bytes:
    """Return changes with a digest that fits, as a hostile sender would make them."""
    return b"HZC1" + xxhash.xxh3_128_digest(body) + body


def unharmed(base: bytes, changes: bytes) -> bool:
    """Apply, with guards around the image; return whether it was refused. A refused image is as it was."""
    guard = np.random.default_rng(0).integers(0, 256, 1 << 14).astype(np.uint8).tobytes()
    memory = bytearray(guard + base + guard)
    try:
        apply_changes(memoryview(memory)[len(guard) : -len(guard)], changes)
    except WeightsRejected:
        assert memory == guard + base + guard
        return True
    assert memory[: len(guard)] == memory[-len(guard) :] == guard
    return False


BASE, NEW = pair(*trained(9_000, 2e-4))
CHANGES = encode_changes(BASE, NEW)


@given(st.integers(0, len(CHANGES) - 1), st.integers(1, 255))
def test_damaged_changes_are_refused(at: int, flip: int) -> None:
    damaged = bytearray(CHANGES)
    damaged[at] ^= flip
    assert unharmed(BASE, bytes(damaged))
    assert unharmed(BASE, CHANGES[:at])


@given(
    st.lists(
        st.tuples(st.integers(20, len(CHANGES) - 1), st.integers(0, 255)), min_size=1, max_size=4
    ),
    st.integers(0, 40),
)
def test_hostile_changes_are_refused_or_stay_within_the_image(
    edits: list[tuple[int, int]], cut: int
) -> None:
    body = bytearray(CHANGES)
    for place, value in edits:
        body[place] = value
    unharmed(BASE, signed(bytes(body[20 : len(body) - (cut if cut < 8 else 0)])))


@given(st.binary(max_size=300))
def test_a_section_of_noise_is_refused(noise: bytes) -> None:
    unharmed(BASE, join_sections(read_layout(BASE), [noise]))


def test_changes_of_other_weights_leave_the_image_as_it_was_or_are_for_the_digest_to_find() -> None:
    refused = 0
    for seed in range(1, 6):
        other = pair(trained(9_000, 2e-4, seed)[0], np.zeros(9_000, np.uint16))[0]
        refused += unharmed(other, CHANGES)
    assert refused


def leb(*numbers: int) -> bytes:
    out = bytearray()
    for number in numbers:
        while number > 0x7F:
            out.append(number & 0x7F | 0x80)
            number >>= 7
        out.append(number)
    return bytes(out)


ONE = leb(7, 0, 255, 1, 2, 1, 0, 1024)
"""A class of all bfloat16 words, with a byte of gaps, and values that are all -1."""
STREAMS = b"\xff" + struct.pack("<HH", 0, 1)
START = read_layout(BASE).data_offset
HOSTILE = {
    "no part": leb(1) + ONE + leb(0, 0) + STREAMS,
    "before the tensors": leb(1) + ONE + leb(1, START - 2, 8, 7, 8, 0, 0) + STREAMS,
    "behind the image": leb(1) + ONE + leb(1, START, 9_001, 7, 8, 0, 0) + STREAMS,
    "far behind the image": leb(1)
    + ONE
    + leb(2, 1 << 55, 1 << 55, 7, 8, 0, 1 << 55, 1 << 55, 7, 0, 0, 0)
    + STREAMS,
    "more changes than words": leb(1) + ONE + leb(1, START, 7, 7, 8, 0, 0) + STREAMS,
    "more changes than bits": leb(1) + ONE + leb(1, START, 9_000, 7, 9, 0, 0) + STREAMS,
    "two parts in one place": leb(0, 2, START, 100, 7, (1 << 64) - 200, 100, 7, 0),
    "an odd byte in a part": leb(1) + ONE + leb(1, START, 8, 7, 8, 0, 1, START + 3, 7) + STREAMS,
    "an odd byte in the header": leb(0, 0, 1, 12, 7),
    "an odd byte of 300": leb(0, 0, 1, START, 300),
    "a wide rice": leb(1) + ONE + leb(1, START, 9_000, 7, 8, 32, 0) + STREAMS,
    "another type": leb(1) + ONE + leb(1, START, 9_000, 10, 8, 0, 0) + STREAMS,
    "classes that overlap": leb(2) + ONE + ONE + leb(0, 0) + 2 * STREAMS,
    "too many classes": leb(65) + 65 * ONE + leb(0, 0) + 65 * STREAMS,
    "no shift": leb(1, 8, 0, 1, 1, 2, 1, 0, 1024, 0, 0) + STREAMS,
    "an exponent of 256": leb(1, 7, 0, 256, 1, 2, 1, 0, 1024, 0, 0) + STREAMS,
    "symbol 64": leb(1, 7, 0, 255, 1, 2, 1, 64, 1024, 0, 0) + STREAMS,
    "frequencies that are too small": leb(1, 7, 0, 255, 1, 2, 1, 0, 1023, 0, 0) + STREAMS,
    "no state": leb(1, 7, 0, 255, 1, 1, 1, 0, 1024, 0, 0) + STREAMS[:3],
    "many parts": leb(0, 1 << 40),
    "many odd bytes": leb(0, 0, 1 << 40),
    "a number without end": b"\xff" * 64,
    "bytes left over": leb(1) + ONE + leb(1, START, 9_000, 7, 8, 0, 0) + STREAMS + b"\0",
    "a state left over": leb(1)
    + ONE
    + leb(1, START, 9_000, 7, 8, 0, 0)
    + b"\xff"
    + struct.pack("<HH", 5, 1),
    "bits left over": leb(1, 7, 0, 255, 2, 2, 1, 0, 1024, 1, START, 9_000, 7, 8, 0, 0)
    + b"\xff\xff"
    + STREAMS[1:],
}


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
def test_what_cannot_be_is_refused(body: bytes) -> None:
    warm_up()  # the compiler's 10 MB of memory are not the decoder's
    tracemalloc.start()
    try:
        assert unharmed(BASE, join_sections(read_layout(BASE), [body]))
        assert tracemalloc.get_traced_memory()[1] < 3_000_000
    finally:
        tracemalloc.stop()


def test_many_sections_take_no_more_memory_than_their_bytes() -> None:
    """One of 11 bytes is valid: a padding of 64 KiB for each would be 6,000 times that."""
    warm_up()
    changes = join_sections(read_layout(BASE), [leb(0, 0, 0)] * 2_000)
    tracemalloc.start()
    try:
        decode_changes(BASE, changes)
        assert tracemalloc.get_traced_memory()[1] < 6_000_000
    finally:
        tracemalloc.stop()


def test_the_least_changes_are_accepted() -> None:
    body = leb(1) + ONE + leb(1, START, 9_000, 7, 8, 0, 0) + STREAMS
    changes = join_sections(read_layout(BASE), [body])
    patched = bytearray(BASE)
    decode_changes(BASE, changes).write(patched)
    assert bytes(patched) == reference.apply(BASE, changes) != BASE
    assert unharmed(BASE, join_sections(read_layout(BASE), [body, body])), (
        "two sections change one part"
    )
    envelope = bytearray(changes)
    envelope[44:48] = struct.pack("<I", 2)
    assert unharmed(BASE, signed(bytes(envelope[20:]))), "a section is missing"


def test_every_loop_is_compiled_in_advance_and_for_one_signature() -> None:
    """With two, processes that start at once could lose one of them in numba's index, and load another's code by it."""
    warm_up_in_thread().join()

    def signatures() -> dict[str, list[Any]]:
        return {
            name: loop.signatures
            for name, loop in vars(kernels).items()
            if isinstance(loop, Dispatcher)
        }

    before = signatures()
    check(BASE, NEW)
    assert unharmed(BASE, join_sections(read_layout(BASE), [HOSTILE["a state left over"]]))
    assert signatures() == before
    # None: its code came from the cache within that of its caller.
    assert {len(each) for each in before.values()} <= {0, 1}
    assert before["patch_section"]
