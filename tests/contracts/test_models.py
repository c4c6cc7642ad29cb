"""The contract that every model family keeps: the learner scores it as the family itself does, however it is laid out.

Tiny random models, in float32; no weights are loaded.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from horizonrl.learner.algorithm.batch import Batch
from horizonrl.learner.engine.model.model import TokenScorer
from horizonrl.learner.engine.model.packing import pack
from horizonrl.learner.engine.recompute import checkpoint_layers
from tests.learner.traces import make_groups

SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "pad_token_id": 0,
}
HEADS: dict[str, Any] = {"head_dim": 16}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DELTA_NET: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
MAMBA: dict[str, Any] = {
    "mamba_d_ssm": 32,
    "mamba_n_heads": 2,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}
WINDOW = 24
"""Shorter than the prompt that is shared."""


@dataclass(frozen=True)
class Family:
    model_type: str
    options: dict[str, Any] = field(default_factory=dict)
    packs: bool = True
    """Whether its layers are attention alone, so that episodes can stand one after the other and share a prompt."""


FAMILIES = [
    Family("llama"),
    Family("qwen2"),
    Family("qwen3", HEADS),
    Family("qwen3_moe", HEADS | EXPERTS),
    Family("qwen3_5_text", HEADS | DELTA_NET, packs=False),
    Family(
        "gemma3_text",
        HEADS | {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    Family("mistral", HEADS | {"sliding_window": WINDOW}),
    Family("lfm2", {"layer_types": ["conv", "full_attention"]}, packs=False),
    Family("falcon_h1", HEADS | MAMBA | {"lm_head_multiplier": 0.5}, packs=False),
    Family("olmo"),
    Family("smollm3"),
    Family("phi"),
    Family("opt", {"ffn_dim": 32, "word_embed_proj_dim": 32, "dropout": 0.5}),
    Family("granite", {"logits_scaling": 4.0}),
    Family("phimoe", {"sliding_window": WINDOW, "num_local_experts": 2}, packs=False),
]


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: family.model_type)
def family(request: pytest.FixtureRequest) -> Family:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small only wait for a second thread: of a busy machine's 140 s 5 are left."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def batch() -> Batch:
    return make_groups(0, groups=1, group_size=4, prompt=60)


def make_model(family: Family) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(
            AutoConfig.for_model(family.model_type, **SMALL | family.options)
        ).eval()


@pytest.fixture(scope="module")
def lm(family: Family) -> Any:
    return make_model(family)


def learned(lm: Any, batch: Batch, flat: bool) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return each token's logprob, trace by trace, and the gradient of their sum weighed by the traces' rewards."""
    lm.zero_grad()
    scorer, rows = TokenScorer(lm), {}
    for micro_batch in pack(batch.traces, 1, 1000, flat=flat)[0]:
        asked = (
            micro_batch.ids_T,
            micro_batch.positions_T,
            micro_batch.segments_S4,
            micro_batch.trained_N,
        )
        logprobs_N = scorer(*map(torch.from_numpy, asked)).logprobs_N
        pulls_B = torch.tensor(
            [float(batch.traces[place].rewards_L.sum()) for place in micro_batch.indices_B]
        )
        (logprobs_N * pulls_B[torch.from_numpy(micro_batch.episodes_N)]).sum().backward()
        for row, place in enumerate(micro_batch.indices_B):
            rows[place] = logprobs_N.detach().numpy()[micro_batch.episodes_N == row]
    gradient = torch.cat([p.grad.flatten() for p in lm.parameters() if p.grad is not None])
    return np.concatenate([rows[place] for place in sorted(rows)]), gradient.numpy()


def test_tokens_are_scored_as_the_family_itself_does(lm: Any, batch: Batch) -> None:
    alone: list[float] = []
    for trace in batch.traces:
        ids_L = torch.from_numpy(trace.ids_L.astype(np.int64))
        with torch.no_grad():
            scores_LV = lm(input_ids=ids_L[None], use_cache=False).logits[0].log_softmax(-1)
        alone += [
            scores_LV[index - 1, ids_L[index]].item() for index in np.flatnonzero(trace.mask_L)
        ]
    assert_allclose(learned(lm, batch, flat=False)[0], alone, atol=2e-5)


def test_a_shared_prompt_changes_neither_scores_nor_gradient(
    family: Family, lm: Any, batch: Batch
) -> None:
    assert TokenScorer(lm).packs is family.packs
    if family.packs:
        for shared, plain in zip(
            learned(lm, batch, flat=True), learned(lm, batch, flat=False), strict=True
        ):
            assert_allclose(shared, plain, atol=2e-4, rtol=1e-3)


def test_a_model_with_few_token_ids_packs_as_well() -> None:
    assert TokenScorer(make_model(Family("llama", {"vocab_size": 64}))).packs


def test_gradient_checkpointing_computes_layers_twice_and_changes_nothing_else(
    family: Family, batch: Batch
) -> None:
    lm, calls = make_model(family), 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    plain = learned(lm, batch, flat=False)
    for layer in lm.base_model.modules():
        if isinstance(layer, torch.nn.ModuleList) and len(layer) == SMALL["num_hidden_layers"]:
            next(layer[0].children()).register_forward_hook(count)
    checkpoint_layers(lm)
    checkpointed = learned(lm, batch, flat=False)
    assert calls > 2
    for mine, theirs in zip(checkpointed, plain, strict=True):
        assert_allclose(mine, theirs, atol=1e-5, rtol=1e-4)
