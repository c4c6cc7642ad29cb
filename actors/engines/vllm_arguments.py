"""Which of vLLM's engine arguments a recipe may set in `[actor.vllm]`. Knows their names, not vLLM."""

from collections.abc import Iterable, Mapping
from typing import Any

from horizonrl.common.errors import ConfigError, did_you_mean

OWN = {
    "model": "model.name",
    "seed": "run.seed",
    "max_model_len": "model.max_context_tokens",
    "max_num_seqs": "actor.slots",
    "gpu_memory_utilization": "actor.gpu_memory_share",
    "kv_cache_memory_bytes": "actor.kv_cache_mib",
    "tensor_parallel_size": "actor.tensor_parallel",
}
"""Arguments that follow from another key, by that key."""

_SAME_IDS = "the engine takes and returns ids, and never sees text (invariants: token exactness)"
_SAME_TOKENS = "what is trained must be what the weights in training sample (invariants: token exactness)"
_SAME_LOGPROBS = "a token's logprob must be that of the distribution it was sampled from"
_SAME_WEIGHTS = "every version must reach every worker whole, and a probe must find it there"
_OWN_ENGINES = "each engine is one process group that takes its weights by itself"
REFUSED = {
    **dict.fromkeys(("skip_tokenizer_init", "tokenizer", "tokenizer_mode", "tokenizer_revision"), _SAME_IDS),
    **dict.fromkeys(("generation_config", "override_generation_config", "logits_processors"), _SAME_TOKENS),
    **dict.fromkeys(("speculative_config", "spec_method", "spec_model", "spec_tokens"), _SAME_TOKENS),
    **dict.fromkeys(("hf_overrides", "model_class_overrides", "model_impl", "diffusion_config"), _SAME_TOKENS),
    **dict.fromkeys(("watermark_config", "kv_sharing_fast_prefill"), _SAME_TOKENS),
    **dict.fromkeys(("logprobs_mode", "max_logprobs", "dtype"), _SAME_LOGPROBS),
    **dict.fromkeys(("quantization", "quantization_config", "load_format", "model_weights"), _SAME_WEIGHTS),
    **dict.fromkeys(("enable_lora", "worker_cls", "worker_extension_cls", "weight_transfer_config"), _SAME_WEIGHTS),
    **dict.fromkeys(("enable_sleep_mode", "cpu_offload_gb", "offload_backend"), _SAME_WEIGHTS),
    **dict.fromkeys(("data_parallel_size", "pipeline_parallel_size", "nnodes", "device_ids"), _OWN_ENGINES),
    "enable_prefix_caching": "each turn begins with all turns before it, and a version's salt parts the caches",
    "trust_remote_code": "a model's directory would run code of its own",
}
"""Arguments that a recipe may not set, with the reason."""


def checked(given: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """Return the arguments of `[actor.vllm]`. Raises ConfigError for one that is unknown, set elsewhere or unsound."""
    names = set(known)
    for name in given:
        if name in OWN:
            raise ConfigError(f"actor.vllm.{name} is set by {OWN[name]}: give that key instead")
        if name in REFUSED:
            raise ConfigError(f"actor.vllm.{name} cannot be set: {REFUSED[name]}")
        if name not in names:
            raise ConfigError(f"actor.vllm.{name} is no argument of this vLLM's engine{did_you_mean(name, names)}")
    return dict(given)
