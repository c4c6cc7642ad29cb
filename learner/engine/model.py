"""A causal language model that scores the tokens it is asked about, and no others; with a critic's head if asked.

Knows nothing of losses or of DeepSpeed. Axes: P shared prefix, B rows, T positions, N asked tokens,
D hidden, V vocabulary.
"""

import math
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from horizonrl.common.errors import ConfigError
from horizonrl.common.imports import uncollected

CHUNK_ROWS = 32
"""Rows of float32 logits alive at once: 32 × 49,152 are 6 MB, which stay in the cache between the passes over them."""
LOG_OF_ZERO = -1e30
"""Replaces the log-probability of a token that a model rules out: −inf would make 0 · ∞ = NaN."""


class ScorerOutput(NamedTuple):
    """What the model outputs for the asked tokens, each in float32."""

    logprobs_N: Tensor
    entropies_N: Tensor
    """Entropy of the distribution at the token's temperature, in nats."""
    values_N: Tensor
    """The critic's estimate of the return from the token on; 0 without a critic."""


class TokenScorer(nn.Module):
    """Wraps a Hugging Face causal LM. Every use goes through `forward`, where the hooks of ZeRO stage 3 see it."""

    def __init__(self, lm: nn.Module, critic: bool = False) -> None:
        super().__init__()
        self.lm = lm
        self.critic = _critic(lm) if critic else None
        self._logit_scale = _logit_scale(cast(Any, lm).config)
        self.shares_prompts: bool = self._probed()
        """Whether a prefix may be given. The model's cache must hold keys and values alone, which every row can
        continue; the state of a recurrent layer (linear attention, Mamba, convolution) cannot be repeated."""

    def trained(self) -> list[dict[str, nn.Parameter]]:
        """Return the parameters in training by name, in the optimizer's groups: the policy's, then the critic's."""
        groups = [{name: parameter for name, parameter in self.lm.named_parameters() if parameter.requires_grad}]
        if self.critic is not None:
            groups.append({f"critic.{name}": parameter for name, parameter in self.critic.named_parameters()})
        return groups

    def forward(
        self, prefix_P: Tensor, ids_BT: Tensor, asked_N: Tensor, temperatures_N: Tensor | float = 1.0
    ) -> ScorerOutput:
        """Score the tokens at flat positions `asked_N` of `ids_BT`, each at its temperature.

        Every row continues the ids of `prefix_P`, which may be empty. Padding must be on the right. The hidden
        state at t − 1 scores the token at position t, so no row's first token may be asked about.
        """
        lm: Any = self.lm
        # Before the head: logits of prompts and observations would cost V numbers per token, for nobody.
        hidden_ND = self._hidden(prefix_P, ids_BT).flatten(0, 1).index_select(0, asked_N - 1)
        logits_NV = lm.get_output_embeddings()(hidden_ND)
        ids_N = ids_BT.flatten().index_select(0, asked_N)
        # The family's factor goes into the temperature, so that no scaled copy of the logits is made.
        scores = token_scores(logits_NV, ids_N, temperatures_N / self._logit_scale)
        if self.critic is None:
            return ScorerOutput(*scores, values_N=torch.zeros_like(scores[0]))
        # Detached: the critic reads the policy's features, and its errors must not move them.
        return ScorerOutput(*scores, values_N=self.critic(hidden_ND.detach())[:, 0].float())

    def _hidden(self, prefix_P: Tensor, ids_BT: Tensor) -> Tensor:
        """Return the last hidden states of the rows. A prefix is read once; its gradient is the sum over rows."""
        # The decoder alone: the model's own forward pass would go on to the logits of every token.
        model: Any = cast(Any, self.lm).base_model
        if len(prefix_P) == 0:
            return cast(Tensor, model(input_ids=ids_BT, use_cache=False).last_hidden_state)
        cache = model(input_ids=prefix_P[None], use_cache=True).past_key_values
        cache.batch_repeat_interleave(len(ids_BT))
        return cast(Tensor, model(input_ids=ids_BT, past_key_values=cache, use_cache=True).last_hidden_state)

    @torch.no_grad()
    def _probed(self) -> bool:
        """Return whether the model's cache can be repeated; raise ValueError if its logits are not the head's output.

        Two tokens go through the model, so that no family with a step of its own is trained on wrong scores.
        """
        from transformers import Cache
        from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin

        lm: Any = self.lm
        ids_BT = torch.arange(2, device=lm.device)[None]
        output = lm.base_model(input_ids=ids_BT, use_cache=True)
        ours, theirs = (
            lm.get_output_embeddings()(output.last_hidden_state),
            lm(input_ids=ids_BT, use_cache=False).logits,
        )
        # Soft-capping is looked up by name below, because it bends large logits most and two tokens may not show it.
        differs = (ours * self._logit_scale - theirs).abs().amax() > 0.02 * theirs.abs().amax()
        if differs or getattr(lm.config, "final_logit_softcapping", None) is not None:
            raise ValueError(
                f"{lm.config.model_type} models transform their logits: not supported; choose another model"
            )
        cache = getattr(output, "past_key_values", None)
        # By class: some layers of hybrid models have caches that cannot be repeated (linear attention, Mamba).
        return isinstance(cache, Cache) and all(
            isinstance(layer, DynamicLayer) and not isinstance(layer, LinearAttentionCacheLayerMixin)
            for layer in cache.layers
        )


def _logit_scale(config: Any) -> float:
    """Return the factor of a family's logits: Cohere and Falcon-H1 multiply the head's output, Granite divides it."""
    factors = (getattr(config, name, None) for name in ("logit_scale", "lm_head_multiplier"))
    divisor = float(getattr(config, "logits_scaling", None) or 1.0)
    return math.prod(float(factor) for factor in factors if factor is not None) / divisor


def checkpoint_layers(lm: nn.Module) -> None:
    """Make every layer keep only its inputs and compute the rest again in the backward pass.

    transformers does so in training mode only, which also turns on dropout and the jitter of routers. The policy in
    training would then differ from the one that actors sample with.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in lm.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"learner.gradient_checkpointing is on but {type(lm).__name__} names no layers that can be computed twice: "
            "turn it off, or choose another model"
        )
    for layer in layers:
        # The reentrant form needs an input with a gradient, which the first layer of a frozen model lacks.
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def token_scores(logits_NV: Tensor, ids_N: Tensor, temperatures_N: Tensor | float = 1.0) -> tuple[Tensor, Tensor]:
    """Return log softmax(logits / temperature) at `ids_N`, and the entropy."""
    dtype = torch.promote_types(logits_NV.dtype, torch.float32)
    temperatures_N = torch.as_tensor(temperatures_N, dtype=dtype, device=logits_NV.device).expand(len(ids_N))
    scores: tuple[Tensor, Tensor]
    scores = _TokenScores.apply(logits_NV, ids_N, temperatures_N)  # type: ignore[no-untyped-call]
    return scores


class _TokenScores(torch.autograd.Function):
    """Float32 softmax over chunks of rows. Keeps the logits in their own precision, and nothing else of their size."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, ids_N: Tensor, temperatures_N: Tensor) -> tuple[Tensor, Tensor]:
        normalisers_N, logprobs_N, entropies_N = (torch.empty_like(temperatures_N) for _ in range(3))
        for start in range(0, len(ids_N), CHUNK_ROWS):
            rows = slice(start, start + CHUNK_ROWS)
            shifted_CV = logits_NV[rows].to(temperatures_N.dtype) / temperatures_N[rows, None]
            largest_C1 = shifted_CV.amax(-1, keepdim=True)
            weights_CV = shifted_CV.sub_(largest_C1).clamp_(min=LOG_OF_ZERO).exp()
            total_C = weights_CV.sum(-1)
            # log p = shifted − log total, so the entropy is log total − E[shifted].
            expected_C = torch.bmm(weights_CV[:, None, :], shifted_CV[:, :, None])[:, 0, 0] / total_C
            entropies_N[rows] = total_C.log() - expected_C
            logprobs_N[rows] = shifted_CV.gather(-1, ids_N[rows, None])[:, 0] - total_C.log()
            normalisers_N[rows] = largest_C1[:, 0] + total_C.log()
        # One number per row restores its softmax: the float32 probabilities are computed again instead of kept.
        ctx.save_for_backward(logits_NV, ids_N, temperatures_N, normalisers_N, entropies_N)
        # Without an entropy bonus the entropy's gradient stays None, which spares the backward pass its longer branch.
        ctx.set_materialize_grads(False)
        return logprobs_N, entropies_N

    @staticmethod
    def backward(ctx: Any, gradient_N: Tensor | None, entropy_gradient_N: Tensor | None) -> tuple[Tensor, None, None]:
        logits_NV, ids_N, temperatures_N, normalisers_N, entropies_N = ctx.saved_tensors
        if gradient_N is None:
            gradient_N = torch.zeros_like(normalisers_N)
        gradient_NV = torch.empty_like(logits_NV)
        for start in range(0, len(ids_N), CHUNK_ROWS):
            rows = slice(start, start + CHUNK_ROWS)
            temperatures_C1 = temperatures_N[rows, None]
            weight_C1 = gradient_N[rows, None] / temperatures_C1
            logprobs_CV = (logits_NV[rows].to(temperatures_N.dtype) / temperatures_C1).sub_(normalisers_N[rows, None])
            if entropy_gradient_N is None:
                gradient_CV = logprobs_CV.exp_().mul_(-weight_C1)
            else:  # ∂H/∂logit = −p (log p + H)
                entropy_C1 = entropy_gradient_N[rows, None] / temperatures_C1
                # p log p of a token that is ruled out is 0 · −∞, which is NaN.
                logprobs_CV.clamp_(min=LOG_OF_ZERO)
                raised_CV = (logprobs_CV + entropies_N[rows, None]).mul_(entropy_C1).add_(weight_C1)
                gradient_CV = logprobs_CV.exp_().mul_(-raised_CV)
            gradient_NV[rows] = gradient_CV.scatter_add_(-1, ids_N[rows, None], weight_C1)
        return gradient_NV, None, None


def _critic(lm: nn.Module) -> nn.Module:
    """Make a value head that begins at 0. It reads the policy's hidden states and sends no gradient into them."""
    embeddings: Any = cast(Any, lm).get_input_embeddings()
    width = embeddings.embedding_dim
    value = nn.Linear(width, 1)
    # Values begin at 0, so the first advantages come from rewards alone and not from the noise of a random head.
    nn.init.zeros_(value.weight)
    nn.init.zeros_(value.bias)
    return nn.Sequential(nn.Linear(width, width), nn.GELU(), value).to(embeddings.weight.dtype)


def load_language_model(model_dir: Path) -> nn.Module:
    """Load the causal LM of a Hugging Face directory in bfloat16, the precision that the actors sample with."""
    with uncollected("transformers.modeling_utils"):
        from transformers import AutoModelForCausalLM

    # The head's logits too: both engines then round a logit in the same way, and the rounding cancels in π/μ (ADR 7).
    return cast(nn.Module, AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16))
