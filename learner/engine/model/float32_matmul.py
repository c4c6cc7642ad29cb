"""Matrix products on a CPU for which torch has no fast kernel in bfloat16: in float32, then rounded to bfloat16.

That is what the kernel does elsewhere, so nothing else changes: parameters, activations and logits stay bfloat16. It
replaces torch's own kernels in this process, and so reaches the backward pass, adapters, attention and both backends.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

NAMES = ("mm", "addmm", "bmm", "baddbmm")


def multiplies_bfloat16() -> bool:
    """Return whether torch has a fast product of bfloat16 on this CPU: oneDNN's, which wants AVX-512 or ARM's bf16."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@cache
def widen_products() -> object:
    """Have torch multiply matrices of bfloat16 in float32 on the CPU, in this process and from now on."""
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=r"(?s).*Overriding a previously registered kernel"
        )
        for name in NAMES:
            product = _wide(torch.library.get_kernel(f"aten::{name}", "CPU"))
            library.impl(name, product, "CPU", with_keyset=True, allow_override=True)
    return library  # torch's own kernels are back when it is collected: the cache keeps it


def _wide(kernel: Any) -> Callable[..., Tensor]:
    def product(keys: Any, *arguments: Any, **named: Any) -> Tensor:
        if not any(
            isinstance(argument, Tensor) and argument.dtype is torch.bfloat16
            for argument in arguments
        ):
            same: Tensor = kernel.call_boxed(keys, *arguments, **named)
            return same
        widened = (
            argument.float() if isinstance(argument, Tensor) else argument for argument in arguments
        )
        wide: Tensor = kernel.call_boxed(keys, *widened, **named)
        return wide.to(torch.bfloat16)

    return product


@contextmanager
def products_in(dtype: torch.dtype) -> Iterator[None]:
    """Multiply float32 matrices as `dtype` and add up in float32, which torch has no product for on CPU."""
    backend: Any = torch.backends.mkldnn
    settings = backend.matmul
    before = settings.fp32_precision
    try:
        settings.fp32_precision = "bf16" if dtype is torch.bfloat16 else before
        yield
    finally:
        settings.fp32_precision = before
