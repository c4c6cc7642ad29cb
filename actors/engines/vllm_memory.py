"""How much of a GPU's memory the engine's cache takes where a learner takes memory at the same time: a pure function.

vLLM sizes its cache by what is free before and after a trial run, and so counts what the learner takes meanwhile as its
own: a tenth of the cache would be left, or none. On a shared GPU the size is therefore computed here, and vLLM is told.
"""

from dataclasses import dataclass

from horizonrl.common.errors import ConfigError

RUNTIME_BYTES = 2.0e9
"""The CUDA context, the libraries' own buffers, captured CUDA graphs and holes of the allocator. An assumption: vLLM
measures them and computes none."""
HIDDEN_COPIES, FEED_FORWARD_COPIES = 4, 3
"""Widths of a token that are alive at once in a layer: residual, norm, attention's input and output; and gate, up and
their product."""
LOGIT_COPIES = 4
"""Rows of the vocabulary per request, in float32: logits, scaled logits, logprobs, noise of the sampler."""


@dataclass(frozen=True, slots=True)
class EngineSize:
    """What an engine on a shared GPU holds, in bytes, tokens and widths. Tensor parallelism divides it by `workers`."""

    gpu_bytes: int
    """Memory of one GPU."""
    share: float
    """Of it, for this engine."""
    workers: int
    weights_bytes: int
    """Weights of the whole model in bfloat16."""
    largest_bytes: int
    """Its largest tensor. New weights of a layer lie beside the old ones while they are loaded."""
    step_tokens: int
    """Most tokens of one step."""
    requests: int
    """Requests that are decoded at once."""
    hidden: int
    feed_forward: int
    vocabulary: int
    context_bytes: int
    """Cache of the longest context, on one GPU."""

    @property
    def workspace_bytes(self) -> float:
        """Memory of one GPU beside weights and cache."""
        widths = (
            HIDDEN_COPIES * self.hidden + FEED_FORWARD_COPIES * self.feed_forward / self.workers
        )
        logits = LOGIT_COPIES * 4 * self.requests * self.vocabulary
        return (
            RUNTIME_BYTES
            + 2 * self.step_tokens * widths
            + logits
            + self.largest_bytes / self.workers
        )


def shared_cache_bytes(size: EngineSize) -> int:
    """Return the bytes of an engine's cache on each GPU. Raises ConfigError where the longest context does not fit."""
    share, weights = size.share * size.gpu_bytes, size.weights_bytes / size.workers
    cache = share - weights - size.workspace_bytes
    if cache < size.context_bytes:
        raise ConfigError(
            f"actor.gpu_memory_share is {size.share:g}: of a shared GPU of {_gb(size.gpu_bytes)} the engine has "
            f"{_gb(share)}, but it needs {_gb(weights)} for weights, {_gb(size.workspace_bytes)} to compute in and "
            f"{_gb(size.context_bytes)} for the cache of one context. Raise the share, raise actor.tensor_parallel, "
            "lower model.max_context_tokens or [actor.vllm] max_num_batched_tokens, or give the actor a GPU to itself"
        )
    return int(cache)


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"
