"""LoRA (arXiv 2106.09685): a frozen model, two narrow matrices per linear layer, and the weights they add up to.

Place in the flow: between the model in training and the weights that actors get, which are those of a full model.
Knows no backend. W is (out, in) and frozen; A is (rank, in), B is (out, rank) and begins at 0.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from horizonrl.broker.weights.adapters import ALPHA, SIDES, add_adapter
from horizonrl.common.errors import ConfigError, MissingDependency
from horizonrl.learner.engine.checkpoint.weights_file import ADAPTERS, write_weights_file

ROWS_BYTES = {"cpu": 1 << 18, "cuda": 1 << 26}
"""Bytes of float32 that are summed at a time without numba: what fits the second-level cache, or fills a GPU."""


def add_adapters(lm: nn.Module, rank: int) -> None:
    """Freeze the model and add an adapter of `rank` to every linear layer of its decoder, but not to the head.

    Raises ConfigError for a model without such layers, MissingDependency if peft is not installed.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise MissingDependency(
            f"lora.rank is {rank}, which needs peft ({error}): pip install peft, or set lora.rank to 0"
        ) from error
    targets = [name for name, module in lm.named_modules() if isinstance(module, nn.Linear)]
    head = cast(Any, lm).get_output_embeddings()
    targets = [name for name in targets if lm.get_submodule(name) is not head]
    if not targets:
        raise ConfigError(
            f"lora.rank is {rank} but {type(lm).__name__} is not made of linear layers (torch.nn.Linear), beside which "
            "adapters could stand: choose another model, or set lora.rank to 0"
        )
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=ALPHA, target_modules=targets), lm)


def policy_weights(lm: nn.Module) -> Iterator[tuple[str, list[nn.Parameter]]]:
    """Yield the Hugging Face name of each weight and its parts: W alone, or W, A and B."""
    named = dict(lm.named_parameters())
    for name, parameter in named.items():
        if ".lora_" in name:
            continue
        # peft moves a wrapped layer's weight to `base_layer`; actors load the names of Hugging Face.
        layer = name.removesuffix(".base_layer.weight")
        factors = (
            [] if layer == name else [named[f"{layer}.lora_{side}.default.weight"] for side in "AB"]
        )
        yield name.replace(".base_layer.", "."), [parameter, *factors]


@torch.no_grad()
def merged(W: Tensor, A: Tensor | None = None, B: Tensor | None = None) -> Tensor:
    """Return W itself, or the sum with its adapter, computed in float32 and rounded once to W's precision.

    The sum runs in the order that PROTOCOL.md gives (section Adapters), so actors that get A and B compute these bits.
    """
    if A is None or B is None:
        return W
    # The learner itself computes with W and B·A apart. A change below half a step of bfloat16 does not reach the
    # actors, which `logprob_gap_fresh` shows and the correction treats like staleness (docs/weights.md).
    out = torch.empty_like(W, memory_format=torch.contiguous_format)
    words = [tensor.detach().contiguous() for tensor in (W, A, B, out)]
    if W.device.type == "cpu" and all(tensor.dtype == torch.bfloat16 for tensor in words):
        with contextlib.suppress(MissingDependency):
            add_adapter(*(tensor.view(torch.int16).numpy().view(np.uint16) for tensor in words))
            return out
    return _merged_by_torch(W, A, B)


def _merged_by_torch(W: Tensor, A: Tensor, B: Tensor) -> Tensor:
    """Return `merged` on any device, in blocks of rows. Products and sums are apart, so that nothing is fused."""
    out, factor = torch.empty_like(W), A.float()
    rows = max(1, ROWS_BYTES.get(W.device.type, 1 << 26) // (4 * A.shape[1]))
    for start in range(0, len(W), rows):
        block = B[start : start + rows].float()
        total = torch.zeros(len(block), A.shape[1], device=W.device)
        for r in range(len(A)):
            total += block[:, r, None] * factor[r]
        total *= ALPHA / len(A)
        total += W[start : start + rows]
        # torch's own NaN differs from device to device.
        out[start : start + rows] = total.to(W.dtype).masked_fill_(total.isnan(), torch.nan)
    return out


@dataclass(frozen=True, slots=True)
class PolicyCopy:
    """A policy in host memory, ready to be written."""

    weights: dict[str, Tensor] = field(default_factory=dict)
    adapters: dict[str, Tensor] = field(default_factory=dict)

    def write(self, path: Path) -> str:
        """Write the weights as safetensors, and the adapters next to them (`ADAPTERS`); return the weights' digest."""
        if self.adapters:  # first, so that a weights file is never without them
            write_weights_file(self.adapters, path.with_suffix(ADAPTERS))
        return write_weights_file(self.weights, path)


def copy_policy(
    lm: nn.Module,
    gather: Callable[[Sequence[Tensor]], list[Tensor]],
    copy: Callable[[str, Tensor], Tensor] | None,
) -> PolicyCopy:
    """Return the merged weights and the adapters, as `copy(name, tensor)` returns them from host memory.

    Every rank calls it, since every rank takes part in `gather`; one without `copy` keeps nothing.
    """
    policy = PolicyCopy()
    for name, parts in policy_weights(lm):
        whole = gather(parts)
        if copy is None:
            continue
        policy.weights[name] = copy(name, merged(*whole).detach())
        # No side is there for a weight without an adapter.
        for side, factor in zip(SIDES, whole[1:], strict=False):
            policy.adapters[f"{name}{side}"] = copy(f"{name}{side}", factor.detach())
    return policy
