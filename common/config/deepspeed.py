"""Which keys of DeepSpeed's own configuration a recipe may set: those that decide where and when, never what.

A run's digests must not depend on them, and a checkpoint has to find its tensors
(`learner/engine/checkpoint/partitions.py`). So a key passes if it is known to do neither harm;
`tests/learner/engine/test_passed_through.py` trains with those of ZeRO.
"""

from collections.abc import Mapping
from typing import Any

from horizonrl.common.errors import did_you_mean

PASSED = {
    "zero_optimization",
    "aio",
    "comms_logger",
    "flops_profiler",
    "memory_breakdown",
    "wall_clock_breakdown",
}
PASSED_OF_ZERO = {
    *(
        "allgather_bucket_size",
        "allgather_partitions",
        "contiguous_gradients",
        "ignore_unused_parameters",
    ),
    *(
        "memory_efficient_linear",
        "offload_optimizer",
        "offload_param",
        "overlap_comm",
        "reduce_bucket_size",
    ),
    *(
        "reduce_scatter",
        "stage3_max_live_parameters",
        "stage3_max_reuse_distance",
        "stage3_module_granularity_threshold",
    ),
    *("stage3_param_persistence_threshold", "stage3_prefetch_bucket_size", "sub_group_size"),
}
PASSED_OF_OFFLOAD = {"device", "pin_memory", "buffer_count", "buffer_size", "max_in_cpu"}
OURS = {
    "activation_checkpointing": "learner.gradient_checkpointing decides",
    "bf16": "the learner always computes in bfloat16 with float32 masters",
    "communication_data_type": "gradients are always added up in float32, so that a step does not depend on the ranks",
    "data_types": "gradients are always added up in float32, so that a step does not depend on its micro-batches",
    "fp16": "the learner always computes in bfloat16 with float32 masters",
    "gradient_accumulation_steps": "learner.micro_batch_tokens decides how a batch is cut",
    "gradient_clipping": "set learner.max_grad_norm",
    "optimizer": "the optimizer is AdamW: set rl.lr, imitation.lr, learner.betas and weight_decay",
    "scheduler": "set rl.lr, rl.lr_schedule and rl.warmup_steps",
    "train_batch_size": "rl.groups_per_step decides",
    "train_micro_batch_size_per_gpu": "set learner.micro_batch_tokens",
    "zero_optimization.elastic_checkpoint": "checkpoints are by parameter and fit any number of ranks",
    "zero_optimization.mics_shard_size": "a checkpoint would not find its tensors",
    "zero_optimization.stage": "set learner.zero_stage",
    "zero_optimization.zenflow": "it steps with gradients of earlier steps, so that a resumed run would differ",
    "zero_optimization.zero_quantized_gradients": "it rounds gradients",
    "zero_optimization.zero_quantized_weights": "it rounds the weights that are trained with",
}
"""Keys that people look for first, and why each is refused."""
DEVICES = ("cpu", "none")


def refuse_unsafe(options: Mapping[str, Any]) -> None:
    """Raise ValueError for a key that would change what is computed, or of which nobody knows whether it would."""
    _refuse("", options, PASSED)
    zero = _table("zero_optimization", options.get("zero_optimization", {}))
    _refuse("zero_optimization.", zero, PASSED_OF_ZERO)
    for name in ("offload_optimizer", "offload_param"):
        offload = _table(f"zero_optimization.{name}", zero.get(name, {}))
        _refuse(f"zero_optimization.{name}.", offload, PASSED_OF_OFFLOAD)
        if offload.get("device", "cpu") not in DEVICES:
            raise ValueError(
                f"zero_optimization.{name}.device is {offload['device']!r}: choose {' or '.join(DEVICES)}, since a "
                "checkpoint reads the state from memory"
            )


def _table(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {value!r}: write it as a table")
    return value


def _refuse(prefix: str, options: Mapping[str, Any], passed: set[str]) -> None:
    for key in options:
        name = f"{prefix}{key}"
        if name in OURS:
            raise ValueError(f"{name} cannot be set: {OURS[name]}")
        if key not in passed:
            raise ValueError(
                f"{name} is no key that is passed to DeepSpeed (these are: {', '.join(sorted(passed))})"
                f"{did_you_mean(key, passed)}"
            )
