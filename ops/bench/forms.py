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


def _xor(old: Words, new: Words) -> bytes:
    import zstandard

    changed = (old ^ new).data.cast("B")
    return bytes(zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(changed))


def _apply_xor(image: Words, data: bytes) -> None:
    import zstandard

    changed = zstandard.ZstdDecompressor().decompress(data)
    np.bitwise_xor(image, np.frombuffer(changed, np.uint16), out=image)


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
    "indices and values": Form(_sparse, _apply_sparse),
}
