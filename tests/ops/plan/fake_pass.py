"""A forward and a backward pass on fake tensors: the shapes and lifetimes of a real model, and none of its bytes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, Qwen2Config

from horizonrl.learner.engine import recompute
from horizonrl.learner.engine.model import attention
from horizonrl.learner.engine.model.model import TokenScorer
from horizonrl.ops.plan.shapes import ModelShape
from tests.ops.plan.live_bytes import LiveBytes


def peak_bytes(
    shape: ModelShape, head_width: int, tokens: int, checkpoint: bool, patch: pytest.MonkeyPatch
) -> int:
    """Return the most bytes of both passes over one episode, parameters aside; half of its tokens are trained.

    Each gradient is freed once it is whole, as stage 1 does.
    """
    patch.setattr(attention, "_attend_on_cpu", _flash)
    # It looks at numbers, which fake tensors have not.
    patch.setattr(TokenScorer, "_probe", lambda self: True)
    live = LiveBytes()
    with FakeTensorMode(allow_non_fake_inputs=True):
        scorer = _scorer(shape, head_width, checkpoint)
        live.begin((*scorer.parameters(), *scorer.buffers()))
        held = live.now
        ids_T = torch.zeros(tokens, dtype=torch.int64)
        segments_S4: Any = SimpleNamespace(tolist=lambda: [[0, tokens, 0, 0]])
        with live:
            output = scorer(ids_T, ids_T, segments_S4, ids_T[: tokens // 2], 1.0)
            output.logprobs_N.sum().backward()
    return live.peaks[""] - held


def _scorer(shape: ModelShape, head_width: int, checkpoint: bool) -> TokenScorer:
    config = Qwen2Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.query_width // head_width,
        num_key_value_heads=shape.kv_width // head_width,
        tie_word_embeddings=shape.tied,
    )
    config.dtype = torch.bfloat16
    lm: Any = AutoModelForCausalLM.from_config(config).eval()
    assert sum(parameter.numel() for parameter in lm.parameters()) == shape.parameters
    attention.register()
    lm.set_attn_implementation(attention.IMPLEMENTATION)
    if checkpoint:
        recompute.checkpoint_layers(lm)
    for parameter in lm.parameters():
        parameter.register_post_accumulate_grad_hook(_free)
    return TokenScorer(lm)


def _flash(q_HTE: Tensor, k_GTE: Tensor, v_GTE: Tensor, segments: Any, scale: float) -> Tensor:
    """CUDA's attention, on fake tensors of the CPU: a build of torch without CUDA has no others."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    output: Tensor = flash(q_HTE[None], k_GTE[None], v_GTE[None], 0.0, True, scale=scale)[0][0]
    return output


def _free(parameter: Tensor) -> None:
    parameter.grad = None
