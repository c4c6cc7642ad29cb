"""A causal language model that scores the tokens it is asked about, and no others; with a critic's head if asked.

Knows nothing of losses or of DeepSpeed. Axes: B rows, T positions of the flat sequence or of a row, S segments,
N asked tokens, C those of one chunk, D hidden, V vocabulary.
"""

import math
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from horizonrl.common.imports import uncollected
from horizonrl.common.logs import get_logger
from horizonrl.learner import memory
from horizonrl.learner.engine import attention
from horizonrl.learner.engine.packing import Segment

log = get_logger()

CHUNK_ROWS = 32
"""Rows of float32 logits alive at once: 32 × 49,152 are 6 MB, which stay in the cache between the passes over them."""
LOGITS_BYTES = 64 << 20
"""Logits alive at once, and as much for their gradient, whatever the batch and the vocabulary: 682 rows of 49,152. A
product of fewer rows is slower, and each further chunk computes its logits twice."""
LOG_OF_ZERO = -1e30
"""Replaces the log-probability of a token that a model rules out: −inf would make 0 · ∞ = NaN."""


class ScorerOutput(NamedTuple):
    """What the model outputs for the asked tokens, each in float32."""

    logprobs_N: Tensor
    entropies_N: Tensor
    """Entropy of the distribution at the token's temperature, in nats."""
    values_N: Tensor
    """The critic's estimate of the return from the token on; 0 without a critic."""
    collisions_N: Tensor
    """Σ π² over the vocabulary, at the token's temperature; 0 where gradients are recorded or nobody uses it."""


class TokenScorer(nn.Module):
    """Wraps a Hugging Face causal LM. Every use goes through `forward`, where the hooks of ZeRO stage 3 see it."""

    def __init__(
        self, lm: nn.Module, critic: bool = False, head_dtype: str | None = None, collisions: bool = False
    ) -> None:
        """`head_dtype` is the precision of the logits; None is that of the model's head."""
        super().__init__()
        self.lm = lm
        self._head_dtype: torch.dtype | None = getattr(torch, head_dtype) if head_dtype else None
        self.critic = _critic(lm) if critic else None
        self._collisions = collisions
        self._logit_scale = _logit_scale(cast(Any, lm).config)
        self.packs: bool = self._probed()
        """Whether episodes stand one after the other and share prompts. Every layer must be attention of a kind that
        `attention.py` knows; the state of a recurrent layer (linear attention, Mamba, convolution) would run on from
        one episode into the next. Such a model reads padded rows, and its segments must have no prefixes."""

    def trained(self) -> list[dict[str, nn.Parameter]]:
        """Return the parameters in training by name, in the optimizer's groups: the policy's, then the critic's."""
        groups = [{name: parameter for name, parameter in self.lm.named_parameters() if parameter.requires_grad}]
        if self.critic is not None:
            groups.append({f"critic.{name}": parameter for name, parameter in self.critic.named_parameters()})
        return groups

    def forward(
        self,
        ids_T: Tensor,
        positions_T: Tensor,
        segments_S4: Tensor,
        asked_N: Tensor,
        temperatures_N: Tensor | float = 1.0,
    ) -> ScorerOutput:
        """Score the tokens at places `asked_N` of a micro-batch, each at its temperature.

        The hidden state at place t − 1 scores the token at t, so no segment's first token may be asked about. Logits
        exist for one chunk of tokens at a time: all but the last are computed again in the backward pass.
        """
        # Before the head: logits of prompts and observations would cost V numbers per token, for nobody.
        hidden_TD = self._hidden(ids_T, positions_T, segments_S4)
        if torch.is_grad_enabled() and hidden_TD.nbytes >= memory.WORTH_RECOMPUTING_BYTES:
            # The peak comes now, at the head, and malloc holds holes between what the layers have kept: 0.3 GB.
            memory.give_back_freed()
        hidden_ND = hidden_TD.index_select(0, asked_N - 1)
        ids_N = ids_T.index_select(0, asked_N)
        temperatures_N = torch.as_tensor(temperatures_N, device=ids_T.device).expand(len(ids_N))
        wholes, rows = (hidden_ND, ids_N, temperatures_N), self._chunks(hidden_ND)
        hidden, ids, temperatures = (torch.split(whole, rows) for whole in wholes)
        last = len(rows) - 1
        scores = [self._scores(hidden[n], ids[n], temperatures[n], again=n < last) for n in range(len(rows))]
        logprobs_N, entropies_N, collisions_N = (torch.cat(column) for column in zip(*scores, strict=True))
        values_N = torch.zeros_like(logprobs_N)
        if self.critic is not None:
            # Detached: the critic reads the policy's features, and its errors must not move them.
            values_N = self.critic(hidden_ND.detach())[:, 0].float()
        return ScorerOutput(logprobs_N, entropies_N, values_N, collisions_N)

    def _chunks(self, hidden_ND: Tensor) -> list[int]:
        """Return the rows of each chunk. The last one is full, because its logits are kept and computed only once."""
        vocabulary = cast(Any, self.lm).config.get_text_config().vocab_size
        most = max(1, LOGITS_BYTES // (vocabulary * (self._head_dtype or hidden_ND.dtype).itemsize))
        full, rest = divmod(len(hidden_ND), most)
        return [rest, *[most] * full] if rest or not full else [most] * full

    def _scores(
        self, hidden_CD: Tensor, ids_C: Tensor, temperatures_C: Tensor, again: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        if again and torch.is_grad_enabled():
            asked = (hidden_CD, ids_C, temperatures_C)
            found: tuple[Tensor, Tensor, Tensor]
            found = checkpoint(self._scores, *asked, use_reentrant=False, preserve_rng_state=False)
            return found
        logits_CV = self._logits(hidden_CD)
        # The family's factor goes into the temperature, so that no scaled copy of the logits is made.
        temperatures_C = temperatures_C / self._logit_scale
        logprobs_C, entropies_C = token_scores(logits_CV, ids_C, temperatures_C)
        if self._collisions and not torch.is_grad_enabled():
            return logprobs_C, entropies_C, collisions(logits_CV, temperatures_C)
        return logprobs_C, entropies_C, torch.zeros_like(logprobs_C)

    def _logits(self, hidden_CD: Tensor) -> Tensor:
        head: Any = cast(Any, self.lm).get_output_embeddings()
        if self._head_dtype in (None, hidden_CD.dtype):
            return cast(Tensor, head(hidden_CD))
        bias = getattr(head, "bias", None)
        bias = None if bias is None else bias.to(self._head_dtype)
        return nn.functional.linear(hidden_CD.to(self._head_dtype), head.weight.to(self._head_dtype), bias)

    def _hidden(self, ids_T: Tensor, positions_T: Tensor, segments_S4: Tensor) -> Tensor:
        """Return the last hidden state of each place. The gradient of a shared prompt is the sum over its episodes."""
        # The decoder alone: the model's own forward pass would go on to the logits of every token.
        model: Any = cast(Any, self.lm).base_model
        segments = tuple(Segment(*numbers) for numbers in segments_S4.tolist())
        if self.packs:
            asked = {"position_ids": positions_T[None], "use_cache": False, "segments": segments}
            return cast(Tensor, model(input_ids=ids_T[None], **asked).last_hidden_state[0])
        # Under causal attention no real token attends to padding on its right, so that no mask is needed.
        lengths = [segment.end - segment.start for segment in segments]
        ids_BT = nn.utils.rnn.pad_sequence(list(torch.split(ids_T, lengths)), batch_first=True)
        hidden_BTD = model(input_ids=ids_BT, use_cache=False).last_hidden_state
        return torch.cat([row_TD[:length] for row_TD, length in zip(hidden_BTD, lengths, strict=True)])

    @torch.no_grad()
    def _probed(self) -> bool:
        """Return whether the model's episodes can be packed; raise ValueError if its logits are not the head's output.

        A few tokens go through the model, so that no family with a step of its own is trained on wrong scores.
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
        # By class: some layers of hybrid models keep a state that runs on (linear attention, Mamba).
        return (
            isinstance(cache, Cache)
            and all(
                isinstance(layer, DynamicLayer) and not isinstance(layer, LinearAttentionCacheLayerMixin)
                for layer in cache.layers
            )
            and self._packs_exactly()
        )

    def _packs_exactly(self) -> bool:
        """Make the model use packed attention if an episode after another one scores as it does alone."""
        lm: Any = self.lm
        own, device = lm.config._attn_implementation, lm.device
        # Not the first ids: those of special tokens are often untrained, and bfloat16 makes chaos of them.
        vocabulary = lm.get_input_embeddings().num_embeddings
        ids_T = (torch.arange(12, device=device) * 7 + vocabulary // 2) % vocabulary
        prompt_P, _, second_T = ids_T.split([3, 4, 5])
        alone_T, places_T = torch.cat([prompt_P, second_T]), torch.arange(8, device=device)
        self.packs = False
        alone_TD = self._hidden(alone_T, places_T, torch.tensor([[0, 8, 0, 0]]))[3:].float()
        try:
            attention.register()
            lm.set_attn_implementation(attention.IMPLEMENTATION)
            self.packs = True
            places_T = torch.cat([places_T[:7], places_T[3:]])
            packed = self._hidden(ids_T, places_T, torch.tensor([[0, 3, 0, 0], [3, 7, 0, 3], [7, 12, 0, 3]]))
            errors_T = (packed[7:].float() - alone_TD).norm(dim=-1) / alone_TD.norm(dim=-1)
            if errors_T.median() <= 0.1:  # bfloat16 alone makes 0.01, and a state that runs on about 1
                return True
        except attention.UnsupportedAttention as error:
            log.info("not_packed", why=str(error))
        lm.set_attn_implementation(own)
        self.packs = False
        return False


def _logit_scale(config: Any) -> float:
    """Return the factor of a family's logits: Cohere and Falcon-H1 multiply the head's output, Granite divides it."""
    factors = (getattr(config, name, None) for name in ("logit_scale", "lm_head_multiplier"))
    divisor = float(getattr(config, "logits_scaling", None) or 1.0)
    return math.prod(float(factor) for factor in factors if factor is not None) / divisor


def token_scores(logits_NV: Tensor, ids_N: Tensor, temperatures_N: Tensor | float = 1.0) -> tuple[Tensor, Tensor]:
    """Return log softmax(logits / temperature) at `ids_N`, and the entropy."""
    dtype = torch.promote_types(logits_NV.dtype, torch.float32)
    temperatures_N = torch.as_tensor(temperatures_N, dtype=dtype, device=logits_NV.device).expand(len(ids_N))
    scores: tuple[Tensor, Tensor]
    scores = _TokenScores.apply(logits_NV, ids_N, temperatures_N)  # type: ignore[no-untyped-call]
    return scores


def collisions(logits_NV: Tensor, temperatures_N: Tensor) -> Tensor:
    """Return Σ softmax(logits / temperature)², the chance that two draws are the same token, in float32."""
    parts = []
    for logits_CV, temperatures_C in zip(
        torch.split(logits_NV, CHUNK_ROWS), torch.split(temperatures_N, CHUNK_ROWS), strict=True
    ):
        scaled_CV = logits_CV.float() / temperatures_C[:, None]
        parts.append((torch.logsumexp(2 * scaled_CV, -1) - 2 * torch.logsumexp(scaled_CV, -1)).exp())
    return torch.cat(parts)


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
