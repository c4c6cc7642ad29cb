"""A causal language model that scores the tokens it is asked about, and no others; with a critic's head if asked.

Knows nothing of losses or of DeepSpeed. Axes: B rows, T positions of the flat sequence or of a row, S segments,
N asked tokens, D hidden, V vocabulary.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from horizonrl.common.errors import ConfigError
from horizonrl.common.imports import uncollected
from horizonrl.common.logs import get_logger
from horizonrl.learner.engine import recompute
from horizonrl.learner.engine.model import attention
from horizonrl.learner.engine.model.head import ScoringHead
from horizonrl.learner.engine.model.packing import MicroBatch, Segment
from horizonrl.learner.engine.transfer import to_device

log = get_logger()


CPU = torch.device("cpu")
ROOM = 1.1
"""Free memory of a GPU that a model needs to be tried there, relative to its weights."""


class ScorerOutput(NamedTuple):
    """What the model outputs for the asked tokens, each in float32."""

    logprobs_N: Tensor
    entropies_N: Tensor
    """Entropy of the distribution at the token's temperature, in nats."""
    values_N: Tensor
    """The critic's estimate of the return from the token on; 0 without a critic."""
    collisions_N: Tensor
    """Σ π² over the vocabulary, at the token's temperature; 0 where gradients are recorded or nobody uses it."""


def scorer_inputs(
    micro_batch: MicroBatch, temperature: float, device: torch.device
) -> list[Tensor]:
    """Return the arguments of a scorer. Demonstrations are scored at temperature 1 (see `EngineSettings`)."""
    temperatures_N = np.where(micro_batch.demo_N, 1.0, temperature)
    return [
        to_device(micro_batch.ids_T, device),
        to_device(micro_batch.positions_T, device),
        torch.from_numpy(micro_batch.segments_S4),  # on the CPU, which cuts by them
        to_device(micro_batch.trained_N, device),
        to_device(temperatures_N, device),
    ]


class TokenScorer(nn.Module):
    """Wraps a Hugging Face causal LM. Every use goes through `forward`, where the hooks of ZeRO stage 3 see it."""

    def __init__(
        self,
        lm: nn.Module,
        critic: bool = False,
        collisions: bool = False,
        device: torch.device = CPU,
    ) -> None:
        """`device` is where the scorer will be used. The model is tried there, and is then where it was before."""
        super().__init__()
        self.lm = lm
        self._logit_scale = _logit_scale(cast(Any, lm).config)
        # After the model, so that the parameters that both have are known by their names in it.
        linear = cast(Any, lm).get_output_embeddings()
        self.head = ScoringHead(linear, self._logit_scale, collisions)
        self.critic = _critic(lm) if critic else None
        with _moved(lm, device):
            self.packs: bool = self._probe()
        """Whether episodes stand one after the other and share prompts. Every layer must be attention of a kind that
        `attention.py` knows; the state of a recurrent layer (linear attention, Mamba, convolution) would run on from
        one episode into the next. Such a model reads padded rows, and its segments must have no prefixes."""

    def trained(self) -> list[dict[str, nn.Parameter]]:
        """Return the parameters in training by name, in the optimizer's groups: the policy's, then the critic's."""
        groups = [
            {
                name: parameter
                for name, parameter in self.lm.named_parameters()
                if parameter.requires_grad
            }
        ]
        if self.critic is not None:
            groups.append(
                {f"critic.{name}": parameter for name, parameter in self.critic.named_parameters()}
            )
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

        The hidden state at place t − 1 scores the token at t, so no segment's first token may be asked about.
        """
        # Before the head: logits of prompts and observations would cost V numbers per token, for nobody.
        hidden_TD = self._hidden(ids_T, positions_T, segments_S4)
        if torch.is_grad_enabled() and hidden_TD.nbytes >= recompute.WORTH_RECOMPUTING_BYTES:
            # The peak comes now, at the head, and malloc holds holes between what the layers have kept: 0.3 GB.
            recompute.give_back_freed(hidden_TD.device)
        hidden_ND = hidden_TD.index_select(0, asked_N - 1)
        ids_N = ids_T.index_select(0, asked_N)
        temperatures_N = torch.as_tensor(temperatures_N, device=ids_T.device).expand(len(ids_N))
        logprobs_N, entropies_N, collisions_N = self.head(hidden_ND, ids_N, temperatures_N)
        values_N = torch.zeros_like(logprobs_N)
        if self.critic is not None:
            # Detached: the critic reads the policy's features, and its errors must not move them.
            values_N = self.critic(hidden_ND.detach())[:, 0].float()
        return ScorerOutput(logprobs_N, entropies_N, values_N, collisions_N)

    def _hidden(self, ids_T: Tensor, positions_T: Tensor, segments_S4: Tensor) -> Tensor:
        """Return the last hidden state of each place. The gradient of a shared prompt is the sum over its episodes."""
        # The decoder alone: the model's own forward pass would go on to the logits of every token.
        model: Any = cast(Any, self.lm).base_model
        segments = tuple(Segment(*numbers) for numbers in segments_S4.tolist())
        if self.packs:
            packed = attention.PackedSegments(segments, ids_T.device)
            asked = {"position_ids": positions_T[None], "use_cache": False, "segments": packed}
            return cast(Tensor, model(input_ids=ids_T[None], **asked).last_hidden_state[0])
        # Under causal attention no real token attends to padding on its right, so that no mask is needed.
        lengths = [segment.end - segment.start for segment in segments]
        ids_BT = nn.utils.rnn.pad_sequence(list(torch.split(ids_T, lengths)), batch_first=True)
        hidden_BTD = model(input_ids=ids_BT, use_cache=False).last_hidden_state
        return torch.cat(
            [row_TD[:length] for row_TD, length in zip(hidden_BTD, lengths, strict=True)]
        )

    @torch.no_grad()
    def _probe(self) -> bool:
        """Return whether the model's episodes can be packed; raise ConfigError if its logits are not the head's output.

        A few tokens go through the model, so that no family with a step of its own is trained on wrong scores.
        """
        from transformers import Cache
        from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin

        lm: Any = self.lm
        ids_BT = torch.arange(2, device=lm.device)[None]
        try:
            output = lm.base_model(input_ids=ids_BT, use_cache=True)
            hidden_BTD = output.last_hidden_state
        except (AttributeError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{lm.config.model_type} models do not give hidden states as others do ({error}): not supported; "
                "choose another model"
            ) from error
        ours = nn.functional.linear(hidden_BTD, self.head.weight, self.head.bias)
        theirs = lm(input_ids=ids_BT, use_cache=False).logits
        # Soft-capping is looked up by name below, because it bends large logits most and two tokens may not show it.
        differs = (ours * self._logit_scale - theirs).abs().amax() > 0.02 * theirs.abs().amax()
        if differs or getattr(lm.config, "final_logit_softcapping", None) is not None:
            raise ConfigError(
                f"{lm.config.model_type} models transform their logits: not supported; choose another model"
            )
        if getattr(lm.config, "keep_window_size", None) is not None:  # Doge
            raise ConfigError(
                f"{lm.config.model_type} models choose which tokens they see by all that stand beside them: not "
                "supported; choose another model"
            )
        cache = getattr(output, "past_key_values", None)
        # By class: some layers of hybrid models keep a state that runs on (linear attention, Mamba).
        return (
            isinstance(cache, Cache)
            and all(
                isinstance(layer, DynamicLayer)
                and not isinstance(layer, LinearAttentionCacheLayerMixin)
                for layer in cache.layers
            )
            and self._packs_exactly()
        )

    def _packs_exactly(self) -> bool:
        """Make the model use packed attention if an episode after another one scores as it does alone."""
        lm: Any = self.lm
        implementation, device = lm.config._attn_implementation, lm.device
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
            packed = self._hidden(
                ids_T, places_T, torch.tensor([[0, 3, 0, 0], [3, 7, 0, 3], [7, 12, 0, 3]])
            )
            errors_T = (packed[7:].float() - alone_TD).norm(dim=-1) / alone_TD.norm(dim=-1)
            # bfloat16 alone makes 0.01, and a state that runs on about 1.
            if errors_T.median() <= 0.1:
                return True
        except attention.UnsupportedAttention as error:
            log.info("not_packed", why=str(error))
        lm.set_attn_implementation(implementation)
        self.packs = False
        return False


@contextmanager
def _moved(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Have a model on another device for a while, if there is room, and afterwards in the memory where it was."""
    kept = [(tensor, tensor.data) for tensor in (*module.parameters(), *module.buffers())]
    on_gpu = device.type == "cuda"
    # At stage 3 a GPU may have room for a part of the model alone. Then the CPU has to do.
    if on_gpu and torch.cuda.mem_get_info(device)[0] < ROOM * sum(data.nbytes for _, data in kept):
        yield
        return
    try:
        for tensor, data in kept:
            tensor.data = data.to(device)
        yield
    finally:
        for tensor, data in kept:
            tensor.data = data
        if on_gpu:
            torch.cuda.empty_cache()  # an engine that starts on the same GPU measures what is left


def _logit_scale(config: Any) -> float:
    """Return the factor of a family's logits: Cohere and Falcon-H1 multiply the head's output, Granite divides it."""
    factors = (getattr(config, name, None) for name in ("logit_scale", "lm_head_multiplier"))
    divisor = float(getattr(config, "logits_scaling", None) or 1.0)
    return math.prod(float(factor) for factor in factors if factor is not None) / divisor


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
    """Load the causal LM of a Hugging Face directory in bfloat16, the precision that the actors sample with.

    Raises ConfigError for a model with buffers that are part of its weights.
    """
    with uncollected("transformers.modeling_utils"):
        from transformers import AutoModelForCausalLM

    # The head's logits too: both engines then round a logit in the same way, and the rounding cancels in π/μ (ADR 43).
    lm = cast(nn.Module, AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16))
    parameters = {name for name, _ in lm.named_parameters(remove_duplicate=False)}
    if buffers := sorted(lm.state_dict().keys() - parameters):
        raise ConfigError(
            f"model.name is {str(model_dir)!r}, which keeps {len(buffers)} tensors besides its parameters, such as "
            f"{buffers[0]}: versions, checkpoints and exports hold parameters alone, so they would be lost. Choose a "
            "model of another family"
        )
    return lm
