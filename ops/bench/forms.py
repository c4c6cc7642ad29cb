"""What others send, and ours, as pairs of functions: encode(old, new) -> bytes, apply(image, bytes) in place.

Each works on whole safetensors images as arrays of words. Written for this bench from the descriptions of their
authors: XOR + zstd is what slime and SkyRL do; sparse is TRL's form (its pull request 5937) and vLLM's
(`SparseWeightPatch`, pull request 40096): int32 indices within a tensor and new bfloat16 values, as safetensors.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from horizonrl.broker.weights.changes import apply_changes, encode_changes, read_layout

Words = np.ndarray[Any, np.dtype[np.uint16]]
ZSTD_LEVEL = 1


class Form(NamedTuple):
    encode: Callable[[Words, Words], bytes]
    apply: Callable[[Words, bytes], None]


def _zstd(data: bytes | memoryview) -> bytes:
    import zstandard

    return bytes(zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(data))


def _unzstd(data: bytes) -> bytes:
    import zstandard

    return bytes(zstandard.ZstdDecompressor().decompress(data))


def _xor(old: Words, new: Words) -> bytes:
    return _zstd((old ^ new).data.cast("B"))


def _apply_xor(image: Words, data: bytes) -> None:
    np.bitwise_xor(image, np.frombuffer(_unzstd(data), np.uint16), out=image)


def _planes(words: Words) -> bytes:
    """Return the low bytes of all words, then the high bytes."""
    return words.view(np.uint8).reshape(-1, 2).T.tobytes()


def _words(planes: bytes) -> Words:
    return np.ascontiguousarray(np.frombuffer(planes, np.uint8).reshape(2, -1).T).view(np.uint16)[
        :, 0
    ]


def _xor_planes(old: Words, new: Words) -> bytes:
    return _zstd(_planes(old ^ new))


def _apply_xor_planes(image: Words, data: bytes) -> None:
    np.bitwise_xor(image, _words(_unzstd(data)), out=image)


def _gaps(old: Words, new: Words) -> bytes:
    """Return 8-bit gaps, of which 255 means 255 unchanged words and no change, and the XOR of the values in planes."""
    positions = np.flatnonzero(old != new)
    gaps = np.diff(positions, prepend=-1) - 1
    skips = gaps // 255
    out = np.full(len(gaps) + int(skips.sum()), 255, np.uint8)
    out[np.cumsum(skips + 1) - 1] = gaps % 255
    return len(out).to_bytes(8, "little") + _zstd(
        out.tobytes() + _planes(old[positions] ^ new[positions])
    )


def _apply_gaps(image: Words, data: bytes) -> None:
    count, raw = int.from_bytes(data[:8], "little"), _unzstd(data[8:])
    gaps = np.frombuffer(raw, np.uint8, count)
    is_change = gaps < 255
    positions = (np.cumsum(gaps.astype(np.int64) + is_change) - 1)[is_change]
    image[positions] ^= _words(raw[count:])


def _sparse(old: Words, new: Words) -> bytes:
    from safetensors.numpy import save

    tensors: dict[str, Any] = {}
    for name, tensor in read_layout(old).tensors.items():
        mine = slice(tensor.offset // 2, (tensor.offset + tensor.size_bytes) // 2)
        indices = np.flatnonzero(old[mine] != new[mine]).astype(np.int32)
        if len(indices):
            tensors |= {f"{name}.indices": indices, f"{name}.values": new[mine][indices]}
    return bytes(save(tensors))


def _apply_sparse(image: Words, data: bytes) -> None:
    from safetensors.numpy import load

    tensors = load(data)
    for name, tensor in read_layout(image).tensors.items():
        if f"{name}.indices" in tensors:
            image[tensor.offset // 2 :][tensors[f"{name}.indices"]] = tensors[f"{name}.values"]


FORMS: Mapping[str, Form] = {
    "ours": Form(encode_changes, apply_changes),
    "XOR, zstd": Form(_xor, _apply_xor),
    "XOR in planes, zstd": Form(_xor_planes, _apply_xor_planes),
    "gaps, zstd": Form(_gaps, _apply_gaps),
    "indices and values": Form(_sparse, _apply_sparse),
}
