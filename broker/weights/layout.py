"""Where a safetensors image has its tensors: what two images must share, so that changes lead from one to the other."""

import json
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import xxhash

from horizonrl.common.errors import WeightsRejected

Buffer = Any
"""Whatever `numpy.frombuffer` reads: bytes, a memory map, a contiguous array."""
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Array = np.ndarray[Any, np.dtype[Any]]

LONGEST_HEADER = 100_000_000
"""In bytes, as the safetensors library has it."""


class TensorPlace(NamedTuple):
    dtype: str
    """As safetensors names it: BF16, F16, F32, ..."""
    shape: tuple[int, ...]
    offset: int
    """Of its first byte, from the start of the file."""
    size_bytes: int


class Part(NamedTuple):
    """A run of elements of one tensor, before and after: all of the tensor, or a rank's slice of it."""

    offset: int
    """Of its first byte, from the start of the file."""
    dtype: str
    """As safetensors names it: BF16, F16, F32, ..."""
    old: Buffer
    new: Buffer


@dataclass(frozen=True)
class Layout:
    """Where a safetensors image has its tensors."""

    image_bytes: int
    data_offset: int
    """Of the first byte behind the header."""
    header_digest: bytes
    """xxh3_128 of all bytes before `data_offset`; changes lead only between images that share it."""
    tensors: dict[str, TensorPlace]


def as_bytes(buffer: Buffer) -> Bytes:
    """Return the buffer's bytes without a copy, as an array that is writable if the buffer is."""
    view = memoryview(buffer)
    return np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)


def read_layout(image: Buffer) -> Layout:
    """Return where a safetensors image has its tensors. Raises WeightsRejected for what is no such image."""
    data = as_bytes(image)
    length = int.from_bytes(data[:8].tobytes(), "little")
    if len(data) < 8 or length > min(len(data) - 8, LONGEST_HEADER):
        raise WeightsRejected(
            f"{len(data)} bytes that begin with a header of {length} bytes are no safetensors file"
        )
    start = 8 + length
    head = data[:start].tobytes()
    try:
        header = json.loads(head[8:])
        tensors = {
            name: _place(entry, start) for name, entry in header.items() if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WeightsRejected(f"the safetensors header cannot be read: {error!r}") from None
    outside = [
        n
        for n, t in tensors.items()
        if not start <= t.offset <= t.offset + t.size_bytes <= len(data)
    ]
    if outside:
        raise WeightsRejected(
            f"the tensor {outside[0]!r} lies outside of the image's {len(data)} bytes"
        )
    return Layout(len(data), start, xxhash.xxh3_128_digest(head), tensors)


def _place(entry: dict[str, Any], start: int) -> TensorPlace:
    first, end = (int(offset) for offset in entry["data_offsets"])
    return TensorPlace(
        str(entry["dtype"]), tuple(int(size) for size in entry["shape"]), start + first, end - first
    )
