"""The arguments of vLLM's engine: ours, and which a recipe may set in `[actor.vllm]`. Knows their names, not vLLM."""

from collections.abc import Iterable, Mapping
from typing import Any

from horizonrl.actors.policy import InferenceSettings
from horizonrl.common.errors import ConfigError, did_you_mean

EXTENSION = "horizonrl.actors.engines.vllm_worker.WeightsExtension"

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
_SAME_TOKENS = (
    "what is trained must be what the weights in training sample (invariants: token exactness)"
)
_SAME_LOGPROBS = "a token's logprob must be that of the distribution it was sampled from"
_SAME_WEIGHTS = "every version must reach every worker whole, and a probe must find it there"
_OWN_ENGINES = "each engine is one process group that takes its weights by itself"
REFUSED = {
    **dict.fromkeys(
        ("skip_tokenizer_init", "tokenizer", "tokenizer_mode", "tokenizer_revision"), _SAME_IDS
    ),
    **dict.fromkeys(
        ("generation_config", "override_generation_config", "logits_processors"), _SAME_TOKENS
    ),
    **dict.fromkeys(
        ("speculative_config", "spec_method", "spec_model", "spec_tokens"), _SAME_TOKENS
    ),
    **dict.fromkeys(
        ("hf_overrides", "model_class_overrides", "model_impl", "diffusion_config"), _SAME_TOKENS
    ),
    **dict.fromkeys(("watermark_config", "kv_sharing_fast_prefill"), _SAME_TOKENS),
    **dict.fromkeys(("logprobs_mode", "max_logprobs", "dtype"), _SAME_LOGPROBS),
    **dict.fromkeys(("quantization", "quantization_config", "model_weights"), _SAME_WEIGHTS),
    **dict.fromkeys(("config_format", "load_format"), _SAME_WEIGHTS),
    **dict.fromkeys(
        ("enable_lora", "worker_cls", "worker_extension_cls", "weight_transfer_config"),
        _SAME_WEIGHTS,
    ),
    **dict.fromkeys(("enable_sleep_mode", "cpu_offload_gb", "offload_backend"), _SAME_WEIGHTS),
    **dict.fromkeys(
        ("data_parallel_size", "pipeline_parallel_size", "nnodes", "device_ids"), _OWN_ENGINES
    ),
    "enable_prefix_caching": "each turn begins with all turns before it, and a version's salt parts the caches",
    "trust_remote_code": "a model's directory would run code of its own",
}
"""Arguments that a recipe may not set, with the reason."""


def checked(arguments: Mapping[str, Any], allowed: Iterable[str]) -> dict[str, Any]:
    """Return the arguments of `[actor.vllm]`. Raises ConfigError for one that is unknown, set elsewhere or unsound."""
    names = set(allowed)
    for name in arguments:
        if name in OWN:
            raise ConfigError(f"actor.vllm.{name} is set by {OWN[name]}: give that key instead")
        if name in REFUSED:
            raise ConfigError(f"actor.vllm.{name} cannot be set: {REFUSED[name]}")
        if name not in names:
            raise ConfigError(
                f"actor.vllm.{name} is no argument of this vLLM's engine{did_you_mean(name, names)}"
            )
    return dict(arguments)


def engine_options(settings: InferenceSettings, on_cpu: bool) -> dict[str, Any]:
    """Return the arguments that HorizonRL sets."""
    options: dict[str, Any] = {
        "model": str(settings.model_dir),
        # Not "auto", which takes Mistral's own files where they lie beside those of Hugging Face.
        "config_format": "hf",
        "load_format": "hf",
        "dtype": "bfloat16",
        # Ids in, ids out: the engine never sees text (token exactness).
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # nothing but the request decides how is sampled
        "max_model_len": settings.max_context_tokens,
        "max_num_seqs": settings.slots,
        "logprobs_mode": "processed_logprobs",  # of the distribution after temperature
        # The prompt of a turn begins with all turns before it. In the sixth turn this brings the first token in 0.2 s
        # instead of 1.1 s (SmolLM2-135M on CPU).
        "enable_prefix_caching": True,
        "seed": settings.seed,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "worker_extension_cls": EXTENSION,
        "tensor_parallel_size": settings.tensor_parallel,
    }
    if on_cpu:
        options |= {
            # Otherwise vLLM compiles the model before it starts.
            "enforce_eager": True,
            # The whole cache is filled with zeros at start: 2 GiB take 6.3 s, 512 MiB take 1.5 s.
            "kv_cache_memory_bytes": settings.kv_cache_mib << 20,
            "block_size": 32,  # the default of 128 never finds a short prompt's prefix
            # A seeded request whose prompt is split kills the engine: CPU generators cannot be wound back.
            "enable_chunked_prefill": False,
            # Without chunks, a prompt has to fit into one step.
            "max_num_batched_tokens": max(2048, settings.max_context_tokens),
        }
    else:
        options["gpu_memory_utilization"] = settings.gpu_memory_share
    return options
