"""The scorer against Hugging Face's own forward pass, one unpadded row at a time."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from torch.utils._python_dispatch import TorchDispatchMode

from horizonrl.common.errors import ConfigError
from horizonrl.learner.engine.model import attention, head
from horizonrl.learner.engine.model.model import TokenScorer, load_language_model
from horizonrl.learner.engine.model.packing import MicroBatch, pack
from tests.learner.traces import make_batch

NOTHING = torch.empty(0, dtype=torch.int64)


def laid_out(micro_batch: MicroBatch) -> list[torch.Tensor]:
    arrays = (
        micro_batch.ids_T,
        micro_batch.positions_T,
        micro_batch.segments_S4,
        micro_batch.trained_N,
    )
    return [torch.from_numpy(array) for array in arrays]


def rows(*lengths: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions and segments of episodes that share nothing."""
    ends = np.cumsum([0, *lengths])
    places = np.concatenate([np.arange(length) for length in lengths])
    return torch.from_numpy(places), torch.tensor(
        [[start, end, 0, 0] for start, end in pairwise(ends.tolist())]
    )


@pytest.fixture(scope="module")
def lm(tiny_model: Path) -> Any:
    return load_language_model(tiny_model).float().eval()


def test_packed_episodes_score_as_if_they_were_alone(lm: Any) -> None:
    batch = make_batch(traces=5)
    (micro_batch,) = pack(batch.traces, 1, 1000)[0]
    scorer = TokenScorer(lm)
    logprobs_N, entropies_N, *_ = scorer(*laid_out(micro_batch))
    alone: list[float] = []
    entropies: list[float] = []
    for trace in sorted(batch.traces, key=lambda trace: -len(trace.ids_L)):
        ids_L = torch.from_numpy(trace.ids_L.astype(np.int64))
        scores_LV = lm(input_ids=ids_L[None]).logits[0].log_softmax(-1)
        asked = np.flatnonzero(trace.mask_L)
        alone += [scores_LV[index - 1, ids_L[index]].item() for index in asked]
        entropies += [
            -(scores_LV[index - 1].exp() * scores_LV[index - 1]).sum().item() for index in asked
        ]
    assert_allclose(logprobs_N.detach(), alone, atol=2e-5)
    assert_allclose(entropies_N.detach(), entropies, atol=2e-5)


def test_no_score_of_all_tokens_with_all_tokens_is_materialised(
    lm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither as a mask nor in the backward pass, and no logits beyond a chunk."""
    tokens, largest = 1500, 0
    monkeypatch.setitem(head.LOGITS_BYTES, "cpu", 100 * 512 * 4)
    scorer = TokenScorer(lm)

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(
            self, call: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            nonlocal largest
            made = call(*args, **(kwargs or {}))
            for tensor in made if isinstance(made, tuple) else (made,):
                largest = max(largest, tensor.numel() if isinstance(tensor, torch.Tensor) else 0)
            return made

    with Sizes():
        scorer(
            torch.randint(512, (tokens,)), *rows(tokens), torch.arange(1, tokens)
        ).logprobs_N.sum().backward()
    heads, layers_wide = 4, tokens * 256
    assert (
        largest
        <= max(heads * attention.BLOCK_QUERIES * attention.BLOCK_KEYS, layers_wide)
        < heads * tokens**2 // 4
    )


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_chunks_of_logits_change_neither_scores_nor_gradient(
    lm: Any, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    scorer, (mb,) = TokenScorer(lm), pack(make_batch(traces=5).traces, 1, 1000)[0]
    outcomes = []
    for most in (1000, chunk):
        monkeypatch.setitem(head.LOGITS_BYTES, "cpu", most * 512 * 4)
        lm.zero_grad()
        logprobs_N, entropies_N, *_ = scorer(*laid_out(mb))
        (logprobs_N * torch.linspace(-1, 1, len(logprobs_N)) + 0.1 * entropies_N).sum().backward()
        gradient = torch.cat([parameter.grad.flatten() for parameter in lm.parameters()])
        outcomes.append((logprobs_N.detach(), entropies_N.detach(), gradient))
    for whole, chunked in zip(*outcomes, strict=True):
        assert_allclose(chunked, whole, atol=1e-5, rtol=1e-5)


def test_an_episode_does_not_see_its_neighbours(lm: Any) -> None:
    ids_T = torch.randint(512, (40,), generator=torch.Generator().manual_seed(0))
    other_T = ids_T.clone()
    other_T[10:20] = 7
    scorer, asked_N = TokenScorer(lm), torch.tensor([5, 25, 29])
    assert torch.equal(
        scorer(ids_T, *rows(10, 10, 20), asked_N)[0], scorer(other_T, *rows(10, 10, 20), asked_N)[0]
    )


def test_each_tokens_temperature_divides_its_logits(lm: Any) -> None:
    ids_T, scorer = (
        torch.randint(512, (10,), generator=torch.Generator().manual_seed(0)),
        TokenScorer(lm),
    )
    logits_V = lm(input_ids=ids_T[None]).logits[0, 4]
    oracle = [(logits_V / T).log_softmax(-1)[ids_T[5]].item() for T in (0.7, 1.0)]
    logprobs_N, *_ = scorer(ids_T, *rows(10), torch.tensor([5, 5]), torch.tensor([0.7, 1.0]))
    assert logprobs_N.tolist() == pytest.approx(oracle, abs=1e-5)


def test_no_token_asked_about_still_has_a_gradient_graph(lm: Any) -> None:
    lm.zero_grad()
    logprobs_N, *_ = TokenScorer(lm)(torch.zeros(1, dtype=torch.int64), *rows(1), NOTHING)
    logprobs_N.sum().backward()
    assert all(
        not parameter.grad.any() for parameter in lm.parameters() if parameter.grad is not None
    )


def test_only_a_score_that_is_asked_for_has_the_squares(lm: Any) -> None:
    (micro_batch,) = pack(make_batch(traces=3).traces, 1, 1000)[0]
    asked, plain = laid_out(micro_batch), TokenScorer(lm)
    scorer = TokenScorer(lm, collisions=True)
    with torch.no_grad():
        scored, unasked = scorer(*asked), plain(*asked)
    assert (scored.collisions_N > 0).all() and (
        scored.collisions_N >= (2 * scored.logprobs_N).exp()
    ).all()
    assert not unasked.collisions_N.any() and not scorer(*asked).collisions_N.any()


@pytest.mark.parametrize("key", ["final_logit_softcapping", "logit_scale"])
def test_a_model_that_transforms_its_logits_in_another_way_is_refused(
    lm: Any, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setattr(lm.config, key, 30.0, raising=False)  # which a Llama does not heed
    with pytest.raises(ValueError, match="transform their logits"):
        TokenScorer(lm)


def test_a_model_whose_buffers_would_be_lost_is_refused(tmp_path: Path) -> None:
    """Apertus keeps two numbers of each layer's activation besides its parameters."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    config = AutoConfig.for_model(
        "apertus", vocab_size=64, num_hidden_layers=2, pad_token_id=0, **sizes
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(
        ConfigError, match=r"keeps 4 tensors.*such as model\.layers\.0\.mlp\.act_fn\.beta"
    ):
        load_language_model(tmp_path)


@pytest.mark.parametrize(
    ("family", "message"),
    [("llama4_text", "do not give hidden states"), ("doge", "choose which tokens they see")],
)
def test_a_family_that_cannot_be_scored_is_refused(family: str, message: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    options = {
        "head_dim": 16,
        "intermediate_size_mlp": 32,
        "num_local_experts": 1,
        "pad_token_id": 0,
    }
    config = AutoConfig.for_model(family, vocab_size=64, num_hidden_layers=1, **sizes, **options)
    with pytest.raises(ConfigError, match=f"{family} models {message}"):
        TokenScorer(AutoModelForCausalLM.from_config(config).eval())
