"""Changed words into the layers of vLLM's model, in place, through vLLM's own loader of sparse patches.

That loader knows names, shards of tensor parallelism and fused layers. It fills a tensor of the checkpoint's shape with
NaN, sets the words, and lets the model load it, which then keeps what is NaN. So a patch reads and writes all of a
tensor several times: at a GPU's bandwidth that is nothing next to reading a file, and on a CPU it takes seven times as
long as the load.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from horizonrl.actors.weights.words import POSITIONS

PLAIN_METHODS = frozenset({"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"})
"""vLLM's ways to compute that take a layer's parameters as its loader left them, on a GPU."""


def is_fast(model: Any) -> bool:
    """Return whether a patch is faster than a load where this model computes."""
    return bool(next(model.parameters()).device.type != "cpu")


def takes_words(model: Any, shapes: Mapping[str, Sequence[int]]) -> bool:
    """Return whether a patch of this model is right: its layers compute with the parameters that the loader writes.

    `shapes` are those of the tensors that versions have. A loader that writes in another way than vLLM's patches allow
    (one that computes what it stores, as Mamba's) gives itself away: a patch without words changes something. Then, or
    if it fails, the parameters are in doubt; see `is_plain`, which comes first and touches nothing.
    """
    before = _sums(model)
    try:
        for name, shape in shapes.items():
            _patch(
                model,
                name,
                shape,
                torch.empty(0, dtype=torch.bfloat16),
                torch.empty(0, dtype=torch.int32),
            )
    except Exception:  # noqa: BLE001 - vLLM has no error tree: whatever failed, this model is not to be patched
        return False
    return _sums(model) == before


def is_plain(model: Any) -> bool:
    """Return whether no layer keeps a copy of its parameters in another form: packed, quantised or derived."""
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if method is not None and type(method).__name__ not in PLAIN_METHODS:
            return False
        # vLLM calls it after each load. What plain attention does there is for quantised caches, except with sinks.
        if hasattr(layer, "process_weights_after_loading"):
            implementation = getattr(layer, "impl", None)
            if (
                type(layer).__name__ != "Attention"
                or getattr(implementation, "sinks", None) is not None
            ):
                return False
    return True


def write_words(model: Any, frame: str, words: str) -> None:
    """Write the words of a file into the layers (`actors/weights/words.py`); `frame` is the version's whole file."""
    tensors = load_file(words)
    with safe_open(frame, "pt") as whole:
        for name, values in tensors.items():
            if not name.endswith(POSITIONS):
                shape = whole.get_slice(name).get_shape()
                _patch(model, name, shape, values.view(torch.bfloat16), tensors[name + POSITIONS])


def _patch(model: Any, name: str, shape: Sequence[int], values: Tensor, positions: Tensor) -> None:
    """Patch one tensor: with all of them in one call, vLLM would hold several, as large as the layers."""
    from vllm.model_executor.model_loader.checkpoint_weight_patch import (
        CheckpointWeightPatch,
        load_checkpoint_weight_patches,
    )

    device = next(model.parameters()).device
    patch = CheckpointWeightPatch(
        name, tuple(shape), torch.bfloat16, values.to(device), positions.to(device)
    )
    load_checkpoint_weight_patches(model, [patch], validate_unique_indices=False)  # they ascend


def _sums(model: Any) -> dict[str, int]:
    """Return a sum of the bits of everything that the model computes with."""
    return {
        name: int(tensor.detach().contiguous().view(torch.uint8).sum(dtype=torch.int64))
        for name, tensor in model.state_dict().items()
        if tensor.numel() and tensor.dim()
    }
