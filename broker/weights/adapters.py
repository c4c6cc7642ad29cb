"""Adapters: what LoRA adds to a frozen model's weights, and the one order in which the sum is computed.

Place in the flow: **Version** → actors. The learner sends the two factors of each matrix, and actors add their product
to the frozen model, as the learner does. A matrix product rounds as its library and its device like. Here the order of
the sum is part of the format (PROTOCOL.md, section Adapters), so that everyone gets the same bits. Axes: O outputs and
I inputs of a layer, R the adapters' rank.

Needs numba, on the first call and not before.
"""

from importlib import import_module
from math import prod
from typing import Any, NamedTuple

import numpy as np

from horizonrl.broker.weights.layout import (
    Buffer,
    Bytes,
    Layout,
    TensorPlace,
    as_bytes,
    read_layout,
)
from horizonrl.common.errors import MissingDependency, WeightsRejected

ALPHA = 32
"""The merged weight is W + ALPHA / rank · B·A. With this scale the best learning rate hardly depends on the rank,
and is about ten times that of full training (LoRA Without Regret, Schulman et al. 2025)."""
SIDES = (".lora_A", ".lora_B")
"""What follows the weight's name in the file of adapters: A is (R, I), B is (O, R)."""

Array = np.ndarray[Any, np.dtype[Any]]


class _Target(NamedTuple):
    """A weight that has an adapter: the places of W, A and B."""

    W: TensorPlace
    A: TensorPlace
    B: TensorPlace


def merge_adapters(base: Buffer, adapters: Buffer, image: Buffer) -> None:
    """Write the safetensors image `base` with `adapters` added to it into `image`, which has the same size.

    Raises WeightsRejected, before anything is written, if the adapters do not fit.
    """
    frozen, factors, target = (as_bytes(buffer) for buffer in (base, adapters, image))
    targets = _targets(read_layout(base), read_layout(adapters))
    if len(target) != len(frozen):
        raise WeightsRejected(
            f"the image has {len(target)} bytes and the frozen model {len(frozen)}"
        )
    copied = 0
    for W, A, B in targets:
        # Whatever is between two matrices, the header too, is as in the frozen model.
        target[copied : W.offset] = frozen[copied : W.offset]
        add_adapter(
            *(_words(*pair) for pair in ((frozen, W), (factors, A), (factors, B), (target, W)))
        )
        copied = W.offset + W.size_bytes
    target[copied:] = frozen[copied:]


def add_adapter(W_OI: Array, A_RI: Array, B_OR: Array, out_OI: Array) -> None:
    """Write W + ALPHA / R · B·A into `out_OI`. All are words of bfloat16 (uint16)."""
    try:
        kernels = import_module("horizonrl.broker.weights.adapter_kernel")
    except ImportError as error:
        raise MissingDependency(
            f"weights as adapters need {error.name}: pip install numba"
        ) from error
    kernels.add_adapter(W_OI, _floats(A_RI), _floats(B_OR), np.float32(ALPHA / len(A_RI)), out_OI)


def _floats(words: Array) -> Array:
    """Return words of bfloat16 as float32, which has the same leading bits."""
    return (words.astype(np.uint32) << 16).view(np.float32)


def _words(data: Bytes, tensor: TensorPlace) -> Array:
    return (
        data[tensor.offset : tensor.offset + tensor.size_bytes]
        .view(np.uint16)
        .reshape(tensor.shape)
    )


def _targets(base: Layout, adapters: Layout) -> list[_Target]:
    """Return the weights with adapters in the order of the file. Raises WeightsRejected if something does not fit."""
    names = {
        name.removesuffix(side)
        for name in adapters.tensors
        for side in SIDES
        if name.endswith(side)
    }
    if len(adapters.tensors) != 2 * len(names):
        raise WeightsRejected(
            f"the adapters have tensors that are not in pairs, {' and '.join(SIDES)}"
        )
    targets = []
    for name in names:
        A, B = (adapters.tensors.get(f"{name}{side}") for side in SIDES)
        if (W := base.tensors.get(name)) is None or A is None or B is None:
            raise WeightsRejected(
                f"the adapter of {name!r} has no weight in the frozen model, or only one side"
            )
        if any(not _is_matrix(tensor) for tensor in (W, A, B)) or not 0 < A.shape[0] == B.shape[1]:
            raise WeightsRejected(
                f"the adapter of {name!r} is not made of matrices of bfloat16, or has no rank"
            )
        if W.shape != (B.shape[0], A.shape[1]):
            raise WeightsRejected(
                f"the adapter of {name!r} is {B.shape} times {A.shape}, and its weight {W.shape}"
            )
        targets.append(_Target(W, A, B))
    targets.sort(key=lambda target: target.W.offset)
    ends = [target.W.offset + target.W.size_bytes for target in targets]
    if any(end > after.W.offset for end, after in zip(ends, targets[1:], strict=False)):
        raise WeightsRejected("two weights with adapters overlap in the frozen model")
    return targets


def _is_matrix(tensor: TensorPlace) -> bool:
    even = tensor.offset % 2 == 0 and tensor.size_bytes == 2 * prod(tensor.shape)
    return even and tensor.dtype == "BF16" and len(tensor.shape) == 2 and min(tensor.shape) > 0
