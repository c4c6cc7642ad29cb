"""Attention as a GPU computes it, on a CPU: the kernel for sequences of any length is replaced by its definition."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from torch import Tensor

from horizonrl.learner.engine import recompute, step
from horizonrl.learner.engine.api import EngineSettings, StepStats
from horizonrl.learner.engine.model import attention, model
from horizonrl.learner.engine.model.attention import PackedSegments, attend
from horizonrl.learner.engine.model.model import TokenScorer, load_language_model
from horizonrl.learner.engine.model.packing import Segment, pack
from horizonrl.learner.engine.registry import make_engine
from tests.learner.traces import make_batch, make_groups

WINDOW = 24
"""Shorter than the prompts that are shared."""


def varlen(
    q_THE: Tensor,
    k_KGE: Tensor,
    v_KGE: Tensor,
    queries_S1: Tensor,
    keys_S1: Tensor,
    longest_queries: int,
    longest_keys: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """Attend as torch's documentation defines `varlen_attn`: in float64, by segment, aligned to the last key."""
    assert queries_S1.dtype is keys_S1.dtype is torch.int32
    assert (longest_queries, longest_keys) == tuple(
        int(ends.diff().max()) for ends in (queries_S1, keys_S1)
    )
    assert int(queries_S1[-1]) == len(q_THE) and int(keys_S1[-1]) == len(k_KGE) == len(v_KGE)
    left, right = window_size
    assert right == 0 and (enable_gqa or q_THE.shape[1] == k_KGE.shape[1])
    shared, outputs = q_THE.shape[1] // k_KGE.shape[1], []
    for segment in range(len(queries_S1) - 1):
        q, k, v = (
            tensor[starts[segment] : starts[segment + 1]].double().transpose(0, 1)
            for tensor, starts in ((q_THE, queries_S1), (k_KGE, keys_S1), (v_KGE, keys_S1))
        )
        k, v = (kept.repeat_interleave(shared, 0) for kept in (k, v))
        behind = torch.arange(k.shape[1] - q.shape[1], k.shape[1])[:, None] - torch.arange(
            k.shape[1]
        )
        hidden = (behind < 0) if left < 0 else (behind < 0) | (behind > left)
        scores = (q @ k.transpose(1, 2) * scale).masked_fill(hidden, -torch.inf)
        outputs.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outputs).to(q_THE.dtype)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Take the branches of a GPU; return the shapes that the kernel is called with."""
    calls: list[tuple[int, ...]] = []

    def recorded(*asked: Any, **options: Any) -> Tensor:
        calls.append(tuple(asked[0].shape))
        return varlen(*asked, **options)

    monkeypatch.setattr(attention, "varlen_attn", recorded)
    monkeypatch.setattr(attention, "on_flash", lambda query, value: True)
    return calls


def attended(
    segments: list[tuple[int, int, int, int]], window: int | None, groups: int
) -> list[Tensor]:
    """Return what four heads attend to in the segments, and the gradients of queries, keys and values."""
    tokens, generator = segments[-1][1], torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, tokens, 8, generator=generator).requires_grad_()
        for heads in (4, groups, groups)
    )
    packed = PackedSegments(tuple(Segment(*numbers) for numbers in segments), q.device)
    out, _ = attend(None, q, k, v, None, segments=packed, sliding_window=window, scaling=0.3)
    pulls = torch.randn(out.shape, generator=generator)
    return [out.detach(), *torch.autograd.grad((out * pulls).sum(), [q, k, v])]


SEGMENTS = {
    "alone": [(0, 30, 0, 0)],
    "no prefixes": [(0, 20, 0, 0), (20, 21, 0, 0), (21, 60, 0, 0)],
    "one token": [(0, 1, 0, 0)],
    "two prompts": [
        *[(0, 30, 0, 0), (30, 45, 0, 30), (45, 46, 0, 30), (46, 80, 0, 30)],
        *[(80, 85, 0, 0), (85, 86, 80, 85), (86, 97, 80, 85), (97, 110, 0, 0)],
    ],
}


@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS)
@pytest.mark.parametrize("window", [None, 1, 10, 200])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a_gpu_attends_as_a_cpu_does(
    on_gpu: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    segments: Any,
    window: int | None,
    groups: int,
) -> None:
    made = attended(segments, window, groups)
    assert len(on_gpu) == 1, "one kernel for all segments"
    monkeypatch.setattr(attention, "on_flash", lambda query, value: False)
    for ours, theirs in zip(made, attended(segments, window, groups), strict=True):
        assert_allclose(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("segments", SEGMENTS.values(), ids=SEGMENTS)
def test_a_gpu_without_the_kernel_attends_segment_by_segment(
    monkeypatch: pytest.MonkeyPatch, segments: Any
) -> None:
    expected = attended(segments, None, 2)
    monkeypatch.setattr(attention, "_attend_on_cpu", attention._attend_by_segment)
    for ours, theirs in zip(attended(segments, None, 2), expected, strict=True):
        assert_allclose(ours, theirs, atol=1e-5, rtol=1e-5)


def test_the_gradient_of_a_key_that_many_segments_see_is_rounded_once() -> None:
    rows_TGE = torch.ones(2, 1, 4, dtype=torch.bfloat16, requires_grad=True)
    places_K = torch.tensor([0, 1] * 500)
    pulls_KGE = torch.rand(1000, 1, 4, generator=torch.Generator().manual_seed(0)).to(
        torch.bfloat16
    )
    attention._Rows.apply(rows_TGE, places_K).backward(pulls_KGE)  # type: ignore[no-untyped-call]
    exact = pulls_KGE.double().view(500, 2, 1, 4).sum(0)
    assert rows_TGE.grad is not None
    assert torch.equal(rows_TGE.grad, exact.to(torch.bfloat16))


@pytest.mark.parametrize(
    ("dtype", "width", "of_values", "capability", "taken"),
    [
        (torch.bfloat16, 128, 128, (9, 0), True),
        (torch.float16, 256, 256, (8, 0), True),
        (torch.bfloat16, 128, 128, (7, 5), False),
        (torch.float32, 128, 128, (9, 0), False),
        (torch.bfloat16, 192, 128, (9, 0), False),
        (torch.bfloat16, 264, 264, (9, 0), False),
        (torch.bfloat16, 84, 84, (9, 0), False),
    ],
)
def test_the_kernel_is_asked_for_what_it_does_alone(
    monkeypatch: pytest.MonkeyPatch,
    dtype: Any,
    width: int,
    of_values: int,
    capability: Any,
    taken: bool,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    query, value = (
        SimpleNamespace(is_cuda=True, device=None, dtype=dtype, shape=(1, 4, 9, each))
        for each in (width, of_values)
    )
    assert attention.on_flash(query, value) is taken  # type: ignore[arg-type]
    query.is_cuda = False
    assert not attention.on_flash(query, value)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def windowed_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mistral whose window is shorter than its episodes."""
    from transformers import MistralConfig, MistralForCausalLM

    directory = tmp_path_factory.mktemp("mistral")
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    config = MistralConfig(
        **sizes, num_attention_heads=4, num_key_value_heads=2, sliding_window=WINDOW
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        MistralForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    return directory


def steps_of(model_dir: Path, tmp_path: Path) -> tuple[list[StepStats], dict[str, Tensor]]:
    """Take two default steps, of two and more micro-batches; return their figures and the weights."""
    from safetensors.torch import load_file

    engine = make_engine(EngineSettings(model_dir, backend="torch", micro_batch_tokens=200))
    batches = (make_groups(1, groups=3, group_size=4, prompt=60), make_batch(0, traces=5))
    stats = [engine.train_step(batch, 1e-5) for batch in batches]
    engine.write_weights(tmp_path / "weights.safetensors")
    engine.close()
    return stats, load_file(tmp_path / "weights.safetensors")


@pytest.fixture
def every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers keep their products alone, however small they are: the default on a CPU for models of a real size."""
    monkeypatch.setattr(recompute, "WORTH_RECOMPUTING_BYTES", 0)


@pytest.mark.usefixtures("every_layer")
@pytest.mark.parametrize("path", ["at once", "by segment"])
@pytest.mark.parametrize("kind", ["tiny_model", "windowed_model"])
def test_a_default_step_on_a_gpus_path_is_the_cpus(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    kind: str,
    path: str,
) -> None:
    model_dir: Path = request.getfixturevalue(kind)
    expected, before = steps_of(model_dir, tmp_path), load_language_model(model_dir).state_dict()
    if path == "at once":
        request.getfixturevalue("on_gpu")
    else:
        monkeypatch.setattr(attention, "_attend_on_cpu", attention._attend_by_segment)
    stats, weights = steps_of(model_dir, tmp_path)
    for ours, theirs in zip(stats, expected[0], strict=True):
        assert ours.trained_tokens == theirs.trained_tokens
        assert ours.loss == pytest.approx(theirs.loss, abs=1e-2)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=2e-2)
    moved, other = (
        torch.cat(
            [(kept - before[name]).flatten().float() for name, kept in sorted(tensors.items())]
        )
        for tensors in (weights, expected[1])
    )
    assert float(torch.nn.functional.cosine_similarity(moved, other, dim=0)) > 0.9


def test_a_model_is_tried_on_the_path_that_trains_it(
    on_gpu: list[Any], monkeypatch: pytest.MonkeyPatch, windowed_model: Path
) -> None:
    lm = load_language_model(windowed_model)
    assert TokenScorer(lm).packs and on_gpu
    monkeypatch.setattr(
        attention, "varlen_attn", lambda *asked, **options: 3.0 - varlen(*asked, **options)
    )
    assert not TokenScorer(lm).packs, "the kernel's result is not what an episode has alone"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_model_is_tried_on_the_device_and_left_in_the_memory_where_it_was(
    monkeypatch: pytest.MonkeyPatch, windowed_model: Path, device: str
) -> None:
    lm = load_language_model(windowed_model)
    tensors = [*lm.parameters(), *lm.buffers()]
    before = [tensor.data_ptr() for tensor in tensors]
    monkeypatch.setattr(Tensor, "to", lambda tensor, device: tensor.clone())  # a device of its own
    emptied: list[bool] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 1 << 40))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    with model._moved(lm, torch.device(device)):
        assert not {tensor.data_ptr() for tensor in tensors} & set(before)
    assert [tensor.data_ptr() for tensor in tensors] == before
    assert emptied == ([True] if device == "cuda" else [])


def test_a_gpu_without_room_leaves_the_trial_to_the_cpu(
    monkeypatch: pytest.MonkeyPatch, windowed_model: Path
) -> None:
    lm = load_language_model(windowed_model)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 1 << 40))
    with model._moved(lm, torch.device("cuda", 0)):
        assert {tensor.device.type for tensor in lm.parameters()} == {"cpu"}


@pytest.mark.parametrize(("settings", "device", "expected"), [
    ({}, "cpu", "keeps"), ({"gradient_checkpointing": True}, "cpu", "twice"), ({"zero_stage": 3}, "cpu", "plain"),
    ({}, "cuda", "plain"), ({"gradient_checkpointing": True}, "cuda", "twice"),
])  # fmt: skip
def test_layers_keep_their_products_on_a_cpu_alone(
    monkeypatch: pytest.MonkeyPatch,
    windowed_model: Path,
    settings: dict[str, Any],
    device: str,
    expected: str,
) -> None:
    made = []
    monkeypatch.setattr(step, "keep_products", lambda lm: made.append("keeps"))
    monkeypatch.setattr(step, "checkpoint_layers", lambda lm: made.append("twice"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 0))
    step.build_scorer(EngineSettings(windowed_model, **settings), torch.device(device))
    assert (made or ["plain"]) == [expected]


@pytest.mark.usefixtures("every_layer")
def test_windows_leave_packed_scores_those_of_episodes_alone(windowed_model: Path) -> None:
    lm: Any = load_language_model(windowed_model).float().eval()
    recompute.keep_products(lm)
    batch, scorer = make_groups(0, groups=2, group_size=3, prompt=60), TokenScorer(lm)
    micro_batches = pack(batch.traces, 1, 120)[0]
    assert len(micro_batches) > 1 and any(mb.segments_S4[:, 2:].any() for mb in micro_batches)
    for mb in micro_batches:
        arrays = (mb.ids_T, mb.positions_T, mb.segments_S4, mb.trained_N)
        logprobs_N = scorer(*map(torch.from_numpy, arrays)).logprobs_N.detach()
        alone: list[float] = []
        for index in mb.indices_B:
            trace = batch.traces[index]
            ids_L = torch.from_numpy(trace.ids_L.astype(np.int64))
            with torch.no_grad():
                states_LD = lm.base_model(
                    input_ids=ids_L[None], use_cache=False, segments=whole(len(ids_L))
                )[0][0]
                scores_LV = lm.get_output_embeddings()(states_LD).log_softmax(-1)
            alone += [
                scores_LV[asked - 1, ids_L[asked]].item() for asked in np.flatnonzero(trace.mask_L)
            ]
        assert_allclose(logprobs_N, alone, atol=2e-5)


def whole(tokens: int) -> PackedSegments:
    return PackedSegments((Segment(0, tokens),), torch.device("cpu"))
