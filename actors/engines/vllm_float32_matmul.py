"""vLLM's matrix products on a CPU for which torch has no fast kernel in bfloat16: in float32, then rounded to bfloat16.

That is what the kernel does elsewhere, so nothing else changes: weights on the wire, activations, cache and logits stay
bfloat16. The packed weights take twice the memory.
"""

from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers import utils


def widen_products() -> None:
    """Have vLLM multiply in float32, in this process and in every model that is loaded from now on."""
    pack = utils.dispatch_cpu_unquantized_gemm

    def pack_wide(layer: Any, remove_weight: bool) -> None:
        weight: Tensor = layer.weight
        if weight.is_meta or weight.ndim != 2 or weight.dtype is not torch.bfloat16:
            pack(layer, remove_weight)
            return
        layer.weight = nn.Parameter(weight.detach().float(), requires_grad=False)
        pack(layer, remove_weight=True)
        # Empty where it was packed; vLLM's fallback multiplies by the weight that it is called with.
        wide, multiply = layer.weight, layer.cpu_linear

        def product(x: Tensor, _: Tensor, bias: Tensor | None) -> Tensor:
            widened: Tensor = multiply(x.float(), wide, None if bias is None else bias.float())
            return widened.to(x.dtype)

        layer.cpu_linear = product
        layer.weight = (
            nn.Parameter(weight.new_empty(0), requires_grad=False) if remove_weight else weight
        )

    # vLLM looks the name up whenever weights have been loaded, so a new version is packed like the first one.
    utils.dispatch_cpu_unquantized_gemm = pack_wide
