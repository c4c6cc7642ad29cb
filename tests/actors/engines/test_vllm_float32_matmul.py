"""How layers of vLLM multiply on a CPU without instructions for bfloat16; test_vllm.py runs whole engines there."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

pytestmark = pytest.mark.process  # the import of vLLM takes 11 to 17 s

Pack = Callable[[nn.Module, bool], None]


@pytest.fixture
def utils() -> Any:
    return pytest.importorskip("vllm.model_executor.layers.utils")


@pytest.fixture
def pack(utils: Any, monkeypatch: pytest.MonkeyPatch) -> Pack:
    from horizonrl.actors.engines.vllm_float32_matmul import widen_products

    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", utils.dispatch_cpu_unquantized_gemm)
    widen_products()
    packs: Pack = utils.dispatch_cpu_unquantized_gemm
    return packs


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("remove_weight", [False, True])
@pytest.mark.parametrize("packs", [False, True])
def test_a_product_is_that_of_float32_rounded_once(
    utils: Any,
    pack: Pack,
    monkeypatch: pytest.MonkeyPatch,
    packs: bool,
    remove_weight: bool,
    bias: bool,
) -> None:
    monkeypatch.setattr(utils.ops, "_supports_onednn", packs and utils.ops._supports_onednn)
    layer = nn.Linear(24, 16, bias=bias).bfloat16().requires_grad_(False)
    weight = layer.weight.clone()
    pack(layer, remove_weight)
    x = torch.randn(5, 24).bfloat16()
    product = layer.cpu_linear(x, layer.weight, layer.bias)  # type: ignore[operator]
    wide = linear(x.float(), weight.float(), layer.bias.float() if bias else None)
    assert product.dtype is torch.bfloat16
    # Another kernel may add up in another order: one unit of the last place, at most.
    assert torch.allclose(product.float(), wide, rtol=2**-7, atol=1e-3)
    assert torch.equal(layer.weight, weight.new_empty(0) if remove_weight else weight)
    assert layer.weight.dtype is torch.bfloat16, "the next version is loaded into what is bfloat16"


def test_other_layers_are_packed_as_before(
    utils: Any, pack: Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(utils.ops, "_supports_onednn", False)
    layer = nn.Linear(24, 16)
    x = torch.randn(5, 24)
    pack(layer, False)
    assert torch.equal(
        layer.cpu_linear(x, layer.weight, layer.bias), linear(x, layer.weight, layer.bias)
    )  # type: ignore[operator]
    # Where the CPU has instructions for bfloat16, vLLM packs a convolution too: of 32 channels or a multiple.
    convolution = nn.Conv1d(32, 32, 4, groups=32).bfloat16()
    pack(convolution, True)
    assert not hasattr(convolution, "cpu_linear")
