"""Changed words: what an engine needs to get from one version to the next, if it can write into its layers.

Place in the flow: verified image of a version → **changed words** → engine. Made while the engine still samples: it
pauses for these words and not for the whole file. Where words have changed, the host's image knows from its patches
(`host_copy.py`); two files of the learner are compared. What they are, the new image says, so that positions
may come from several versions in any order, and one too many does no harm.

A word has 16 bits, and its position is its number behind the header. Axis: W words.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import numpy as np
import xxhash

from horizonrl.broker.weights.layout import Array, Layout, read_layout
from horizonrl.common.errors import WeightsRejected

POSITIONS = ":positions"
"""Behind a tensor's name, in a file of changed words: where its words belong in the flat tensor."""
MOST_CHANGED = 1 / 32
"""Share of the words above which the whole file is loaded. A step at a learning rate of 1e-5 changes 1 to 2 %. Changed
words take 6 bytes each in memory, and twice that while they are looked for."""
COMPARED_WORDS = 1 << 20
"""At once: as many as a core's cache holds."""
LARGEST_NUMBER = 0x7F80
"""Infinity, in bfloat16 without a sign. What is above is no number."""
DIGEST_BYTES = 16


def compare(old: Path, new: Path) -> Array | None:
    """Return the positions at which two images differ, ascending, or None if an engine should load the new one whole.

    Reads both: 0.4 s of one core per GB of weights, in a thread.
    """
    images = [_image(file) for file in (old, new)]
    if None in images:
        return None
    (before, old_W), (after, new_W) = (image for image in images if image is not None)
    if before.header_digest != after.header_digest or len(old_W) != len(new_W):
        return None
    blocks, total = [], 0
    for start in range(0, len(new_W), COMPARED_WORDS):
        end = start + COMPARED_WORDS
        block = np.flatnonzero(old_W[start:end] != new_W[start:end])
        total += len(block)
        if total > MOST_CHANGED * len(new_W):
            return None
        blocks.append(block + start)
    positions_W: Array = np.concatenate([np.empty(0, np.int64), *blocks])
    return positions_W


def changed_words(image: Path, positions_W: Array) -> BinaryIO | None:
    """Return a file in memory with the words at these positions of an image, or None if it should be loaded whole.

    A safetensors file: of each tensor that has some, the new words under its name, and under its name and `POSITIONS`
    where they belong. NaN is no word that can be written, because it is vLLM's sign for a word that stays.
    """
    from safetensors.numpy import save

    read = _image(image)
    if read is None or len(positions_W) > MOST_CHANGED * len(read[1]):
        return None
    layout, words = read
    new_W = words[positions_W]
    if ((new_W & 0x7FFF) > LARGEST_NUMBER).any():
        return None
    tensors: dict[str, Array] = {}
    for name, tensor in layout.tensors.items():
        first, size = (tensor.offset - layout.data_offset) // 2, tensor.size_bytes // 2
        start, end = np.searchsorted(positions_W, (first, first + size))
        if start < end:
            tensors[name] = new_W[start:end]
            narrow = np.int32 if size <= 1 << 31 else np.int64
            tensors[name + POSITIONS] = (positions_W[start:end] - first).astype(narrow)
    file = os.fdopen(os.memfd_create("changed-words"), "w+b")
    file.write(save(tensors))
    file.flush()
    return file


def write_note(note: Path, layout: Layout, written: Iterable[tuple[int, Array]]) -> None:
    """Note where a patch of an image wrote: for each part, its offset and the numbers of words in it.

    Writes nothing if it is too much, or does not fit the file system: then the image is loaded whole.
    """
    parts = [
        (offset - layout.data_offset) // 2 + numbers.astype(np.int64) for offset, numbers in written
    ]
    positions_W = np.sort(np.concatenate([np.empty(0, np.int64), *parts]))
    if 2 * len(positions_W) > MOST_CHANGED * layout.image_bytes:
        return
    gaps_W = np.diff(positions_W, prepend=0)
    if gaps_W.max(initial=0) >> 32:
        return
    gaps = gaps_W.astype("<u4").tobytes()
    try:
        note.write_bytes(xxhash.xxh3_128_digest(gaps) + gaps)
    except OSError:
        note.unlink(missing_ok=True)


def read_note(note: Path) -> Array | None:
    """Return the positions of a note, or None if it is not there, not whole, or damaged."""
    try:
        data = note.read_bytes()
    except OSError:
        return None
    digest, gaps = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
    if xxhash.xxh3_128_digest(gaps) != digest:
        return None
    return np.cumsum(np.frombuffer(gaps, "<u4"), dtype=np.int64)


def _image(file: Path) -> tuple[Layout, Array] | None:
    """Return an image's layout and all of its words, mapped; None for what is no image of bfloat16 alone."""
    try:
        data = np.memmap(file, np.uint8, "r")
        layout = read_layout(data)
    except (OSError, ValueError, WeightsRejected):
        return None
    words = data[layout.data_offset :]
    if len(words) % 2 or any(tensor.dtype != "BF16" for tensor in layout.tensors.values()):
        return None
    return layout, words.view(np.uint16)
