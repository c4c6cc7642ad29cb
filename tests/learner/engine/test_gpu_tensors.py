"""What the engine does with a GPU's tensors, without a GPU: with torch's meta tensors, which are nowhere and hold
nothing, and with tensors on the CPU that say they are on a GPU, where the numbers matter.
"""

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from torch import Tensor

from horizonrl.learner.engine import host_memory, recompute
from horizonrl.learner.engine.model import attention, head, lora
from horizonrl.learner.engine.model.packing import Segment
from horizonrl.learner.engine.transfer import to_device

GPU = torch.device("cuda", 0)
META = torch.device("meta")


class OnGpu(Tensor):
    """A tensor in the CPU's memory that says it is on a GPU, as all say that are computed from it."""

    device = GPU  # type: ignore[assignment]
    is_cuda = True


def on_gpu(*shape: int, seed: int = 0) -> Tensor:
    return (
        torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        .bfloat16()
        .as_subclass(OnGpu)
    )


def test_the_head_cuts_a_gpus_tokens_by_a_gpus_limits_and_scores_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hidden_ND, weight_VD = on_gpu(60, 64), on_gpu(500, 64, seed=1) / 20
    expected = (hidden_ND @ weight_VD.t()).as_subclass(Tensor).float().log_softmax(-1)[:, 7]
    monkeypatch.setitem(head.LOGITS_BYTES, "cuda", 25 * 500 * 2)
    monkeypatch.setitem(head.CHUNK_ROWS, "cuda", 10)
    rows: list[int] = []
    score = head._score

    def counted(logits_RV: Tensor, *asked: Tensor) -> Any:
        rows.append(len(logits_RV))
        return score(logits_RV, *asked)

    monkeypatch.setattr(head, "_score", counted)
    scoring = head.ScoringHead(SimpleNamespace(weight=weight_VD), 1.0, False)
    logprobs_N, _, _ = scoring(hidden_ND, torch.full((60,), 7), torch.ones(60))
    assert rows == [10, 10, 10, 5, 10, 10, 5]  # chunks of 10, 25 and 25 tokens: the last is full
    assert_allclose(logprobs_N, expected, rtol=1e-5)


def test_a_gpu_adds_up_products_of_bfloat16_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    products: list[tuple[int, ...]] = []

    def wide_product(left: Tensor, right: Tensor, out_dtype: torch.dtype) -> Tensor:
        """Multiply bfloat16 into float32, which torch does on a GPU alone."""
        products.append(tuple(left.shape))
        return left.to(out_dtype).mm(right.to(out_dtype))

    monkeypatch.setattr(torch, "mm", wide_product)
    monkeypatch.setitem(head.SUMMED_COLUMNS, "cuda", 300)
    sums_VD, exact = head._Sum(True, 2), torch.zeros(500, 64, dtype=torch.float64)
    for seed in range(2):
        gradient_CV, hidden_CD = on_gpu(25, 500, seed=seed), on_gpu(25, 64, seed=seed + 2)
        sums_VD.add_product(gradient_CV, hidden_CD)
        exact += gradient_CV.double().t().mm(hidden_CD.double()).as_subclass(Tensor)
    assert products == [(300, 25), (200, 25)] * 2
    made = sums_VD.rounded(on_gpu(1))
    assert made is not None and made.dtype is torch.bfloat16
    assert float((made.double() - exact).norm() / exact.norm()) < 0.003  # one rounding


def test_adapters_are_merged_where_the_weights_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        lora, "add_adapter", lambda *words: pytest.fail("a GPU's words went through NumPy")
    )
    W, A, B = (
        torch.empty(shape, dtype=torch.bfloat16, device=META)
        for shape in ((70, 30), (4, 30), (70, 4))
    )
    whole = lora.merged(W, A, B)
    assert (whole.shape, whole.dtype, whole.device) == (W.shape, W.dtype, META)


@pytest.mark.parametrize("rows", [1, 32, 70, 1000])
def test_adapters_are_merged_to_the_same_bits_in_blocks_of_any_size(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice = torch.Generator().manual_seed(0)
    W, A, B = (
        torch.randn(shape, generator=dice).bfloat16() for shape in ((70, 30), (4, 30), (70, 4))
    )
    monkeypatch.setitem(lora.ROWS_BYTES, "cpu", rows * 4 * 30)
    assert torch.equal(lora._merged_by_torch(W, A, B), lora.merged(W, A, B))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_that_no_kernel_takes_are_attended_to_by_segment(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        attention,
        "_attend_on_cpu",
        lambda *asked: pytest.fail("the CPU's kernel on another device"),
    )
    query, key, value = (
        torch.empty(1, heads, 12, 8, dtype=dtype, device=META) for heads in (4, 2, 2)
    )
    packed = attention.PackedSegments((Segment(0, 5), Segment(5, 12, 0, 3)), META)
    made, _ = attention.attend(None, query, key, value, None, segments=packed)
    assert (made.shape, made.device) == ((1, 12, 4, 8), META)


def test_an_array_goes_to_a_gpu_from_pinned_memory_and_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []

    def pin(tensor: Tensor) -> Any:
        asked.append(tensor.tolist())
        return SimpleNamespace(to=lambda device, **options: asked.append((device, options)))

    monkeypatch.setattr(Tensor, "pin_memory", pin)
    to_device(np.arange(6)[::2], GPU)
    assert asked == [[0, 2, 4], (GPU, {"non_blocking": True})]
    assert to_device(np.arange(3), META).device == META
    assert len(asked) == 2


def test_a_gpus_weights_are_copied_into_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[bool] = []
    empty = torch.empty

    def empty_without_pinning(*size: int, pin_memory: bool = False, **options: Any) -> Tensor:
        pinned.append(pin_memory)
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", empty_without_pinning)
    host = host_memory.HostMemory()
    pinned.clear()
    tensor = torch.full((3, 2), 0.5).as_subclass(OnGpu)
    copied = host.copy("a", tensor)
    assert copied is not tensor and torch.equal(copied, torch.full((3, 2), 0.5).bfloat16())
    assert pinned == [True]
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    host.wait()
    assert waited == [GPU]


@pytest.mark.parametrize(("device", "trimmed"), [(torch.device("cpu"), [0]), (GPU, [])])
def test_freed_memory_is_given_back_where_activations_are_mallocs(
    device: torch.device, trimmed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    given_back: list[int] = []
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(malloc_trim=given_back.append))
    recompute.give_back_freed(device)
    assert given_back == trimmed
