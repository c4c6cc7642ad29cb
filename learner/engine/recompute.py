"""What keeps a rank's memory small: layers that compute again what is cheap, and what malloc would keep is given back.

Knows nothing of batches or losses. Nothing here changes a bit of a result: what is computed again is computed in the
same way, so a run may be resumed with other settings.
"""

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

from horizonrl.common.errors import ConfigError

WORTH_RECOMPUTING_BYTES = 1 << 20
"""Layers with a smaller input keep everything: the calls of a second pass would cost more time than its arithmetic."""
_PRODUCTS = frozenset(
    {
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "aten::baddbmm",
        "aten::_grouped_mm",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
    }
)
"""Matrix products and attention take nearly all of a layer's time, and a third of its memory."""


def checkpoint_layers(lm: nn.Module) -> None:
    """Make every layer keep only its inputs and compute the rest again in the backward pass.

    transformers does so in training mode only, which also turns on dropout and the jitter of routers. The policy in
    training would then differ from the one that actors sample with.
    """
    layers = _layers(lm)
    if not layers:
        raise ConfigError(
            f"learner.gradient_checkpointing is on but {type(lm).__name__} names no layers that can be computed twice: "
            "turn it off, or choose another model"
        )
    for layer in layers:
        # The reentrant form needs an input with a gradient, which the first layer of a frozen model lacks.
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def keep_products(lm: nn.Module) -> None:
    """Make every layer keep its matrix products and compute norms, rotations and activations again.

    They are a tenth of a layer's time and two thirds of its memory.
    """
    for layer in _layers(lm):
        layer.forward = partial(_keeping_products, layer.forward)


def _keeping_products(forward: Callable[..., Any], *asked: Any, **named: Any) -> Any:
    # The hidden states come first, by place or by name.
    hidden = next((part for part in (*asked, *named.values()) if isinstance(part, Tensor)), None)
    if not torch.is_grad_enabled() or hidden is None or hidden.nbytes < WORTH_RECOMPUTING_BYTES:
        return forward(*asked, **named)
    # Nothing in a layer is drawn at random: the model is in evaluation mode.
    options: dict[str, Any] = {
        "use_reentrant": False,
        "preserve_rng_state": False,
        "determinism_check": "none",
    }
    return checkpoint(forward, *asked, context_fn=_first_and_second_pass, **options, **named)


def _first_and_second_pass() -> tuple["_FirstPass", "_SecondPass"]:
    kept: list[Any] = []
    return _FirstPass(kept), _SecondPass(kept)


class _FirstPass(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the products. torch's own selective checkpoints keep the last one too, which nobody asks for again."""

    def __init__(self, kept: list[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func.name() in _PRODUCTS:
            kept = tree_map_only(Tensor, _detach, output)
            self._kept.append((kept, _versions(kept)))
        return output

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        # The layer adds it to its input, and an addition needs neither of its terms again.
        if self._kept:
            self._kept[-1] = None


class _SecondPass(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives back what the first pass has kept, each product once, and computes the rest."""

    def __init__(self, kept: list[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept, self._next = kept, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() in _PRODUCTS:
            kept, self._kept[self._next] = self._kept[self._next], None
            self._next += 1
            # A layer may have written into a product since: then it is computed again.
            if kept is not None and kept[1] == _versions(kept[0]):
                return kept[0]
        return func(*args, **(kwargs or {}))


def _detach(tensor: Tensor) -> Tensor:
    """Return a tensor apart from the graph, which is about to take hold of this one, that shares its version."""
    # Below autograd the version is not shared otherwise; torch's own selective checkpoints do the same.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def _versions(output: Any) -> list[int]:
    return [leaf._version for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]


def _layers(lm: nn.Module) -> list[nn.Module]:
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in lm.modules() if isinstance(module, GradientCheckpointingLayer)]


def give_back_freed(device: torch.device) -> None:
    """Return what malloc keeps of freed activations to the system, where they were and the C library is glibc."""
    if device.type != "cpu":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
