"""Changes: what turns one version's weights into the next one's, without loss and close to their entropy.

Place in the flow: **Version** → actors, between key frames. A pure function pair over whole safetensors images whose
headers are equal; PROTOCOL.md, section Changes, is the format. The old weights, which both sides have, say how
probable a change is: where a weight is small, a unit in the last place is a small step. So the words of a tensor fall
into classes by their old exponent, and each class has its own density (gaps between changes, Golomb-Rice) and its own
table of values (rANS: range asymmetric numeral systems, arXiv:1311.2540).

How to use it:

- a learner: `changes = encode_changes(old_image, new_image)`, which encodes large images on all cores
- a program whose processes hold slices: each calls `encode_section([Part(offset, dtype, old, new), ...])`, with
  offsets from `read_layout(image)`; one of them calls `join_sections(read_layout(image), sections)`
- an actor: `apply_changes(image, changes)` on a private copy, in a thread (the loops release the GIL); or in two steps,
  `decoded = decode_changes(image, changes)`, which writes nothing, and `decoded.write(image)`. Several deltas are
  applied in their order.
- `warm_up()` compiles the loops: seconds once, and then they are in a cache. `make setup` calls it, and a role calls
  `warm_up_in_thread()` while it waits for its first work.

The changes carry a digest of themselves and of the image's header, not of its weights: that `image` is the base, and
that the result is the new version, the caller knows by the digests in its manifests (xxh3_128 of the whole image).

Needs numba, which comes with vLLM, on the first call and not before: the controller never loads it.
"""

import contextlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from threading import Thread
from types import ModuleType

from horizonrl.broker.weights.envelope import join_sections
from horizonrl.broker.weights.layout import Array, Buffer, Layout, Part, as_bytes, read_layout
from horizonrl.common.errors import MissingDependency, WeightsRejected

__all__ = [
    "Decoded",
    "Part",
    "apply_changes",
    "decode_changes",
    "encode_changes",
    "encode_section",
    "join_sections",
    "read_layout",
    "warm_up",
    "warm_up_in_thread",
]

SECTION_BYTES = 1 << 29
"""A section that has this much of the image is closed. The cores encode sections side by side, as the loops release the
GIL; a section has tables of its own, about 5 kB."""


def encode_changes(base: Buffer, new: Buffer) -> bytes:
    """Return what turns the image `base` into `new`. Raises WeightsRejected if their headers differ."""
    layout, other = read_layout(base), read_layout(new)
    if (other.header_digest, other.image_bytes) != (layout.header_digest, layout.image_bytes):
        raise WeightsRejected(
            "the two images have different headers, so no changes lead between them: send a key frame"
        )
    olds, news = as_bytes(base), as_bytes(new)
    sections: list[list[Part]] = [[]]
    filled = 0
    for tensor in layout.tensors.values():
        if filled >= SECTION_BYTES:
            sections.append([])
            filled = 0
        start, end = tensor.offset, tensor.offset + tensor.size_bytes
        sections[-1].append(Part(start, tensor.dtype, olds[start:end], news[start:end]))
        filled += tensor.size_bytes
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return join_sections(layout, list(pool.map(encode_section, sections)))


def encode_section(parts: Iterable[Part]) -> bytes:
    """Return the changes of some parts, which must not overlap; sections are joined by `join_sections`.

    Takes up to 15 bytes of memory per changed word, next to the parts themselves.
    """
    return bytes(_module("encoding").encode(parts))


class Decoded:
    """Changes whose digest, heads and bounds are right. Gaps and values are decoded while they are written."""

    def __init__(self, layout: Layout, changes: Buffer) -> None:
        self._layout = layout
        self._decoding = _module("decoding")
        self._sections = self._decoding.read_sections(layout, as_bytes(changes))

    def write(self, image: Buffer) -> list[tuple[int, Array]]:
        """Patch a writable image in place; return where: for each part, its offset, and which of its words changed.

        Raises WeightsRejected if a stream is malformed, or the image is not the base and the streams do not fit it:
        then the image is as it was. For that the words that are overwritten are kept until the end, with their
        positions, in 6 bytes per changed word: at most 48 times the changes, and 3 times the image.
        """
        target = as_bytes(image)
        if not target.flags.writeable or len(target) != self._layout.image_bytes:
            raise TypeError(
                "the image is read-only, or not the one that the changes were decoded for"
            )
        written: list[tuple[int, Array]] = self._decoding.patch(target, self._sections)
        return written


def decode_changes(image: Buffer, changes: Buffer) -> Decoded:
    """Return changes that are ready to be written to `image`, of which only the header is read here.

    Raises WeightsRejected for changes that are damaged, malformed, or of an image with another header.
    """
    return Decoded(read_layout(image), changes)


def apply_changes(image: Buffer, changes: Buffer) -> None:
    """Patch a writable image in place. Raises WeightsRejected for malformed changes; then the image is as it was."""
    decode_changes(image, changes).write(image)


def warm_up() -> None:
    """Compile the loops, or load them from numba's cache."""
    header = b'{"a":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]}}'
    words = (b"\0\0", b"\1\0", b"\0\x40")
    image, new, other = (
        bytearray(len(header).to_bytes(8, "little") + header + word) for word in words
    )
    changes = encode_changes(image, new)
    apply_changes(image, changes)
    # They are not of these weights, and so are taken back.
    with contextlib.suppress(WeightsRejected):
        apply_changes(other, changes)


def warm_up_in_thread() -> Thread:
    """Compile the loops while the caller goes on. Without numba nothing happens: the first changes will say so."""

    def work() -> None:
        with contextlib.suppress(MissingDependency):
            warm_up()

    # Not a daemon: a process that ends waits for it. LLVM must not be unloaded while it compiles.
    thread = Thread(target=work, name="codec-warm-up")
    thread.start()
    return thread


def _module(name: str) -> ModuleType:
    try:
        return import_module(f"horizonrl.broker.weights.{name}")
    except ImportError as error:
        raise MissingDependency(
            f"weights as changes need {error.name}: pip install numba"
        ) from error
