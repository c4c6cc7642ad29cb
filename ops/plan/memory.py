"""The memory of a learner's rank and of an actor's GPU, from the model's shape and the recipe: pure functions.

docs/scaling.md has the large terms. `tests/ops/plan` counts the same bytes while DeepSpeed takes a step, and on fake
tensors of the real sizes.
"""

from dataclasses import dataclass

from horizonrl.common.config.schema import RunConfig
from horizonrl.ops.plan import constants as c
from horizonrl.ops.plan.hardware import Fleet
from horizonrl.ops.plan.shapes import ModelShape


@dataclass(frozen=True, slots=True)
class LearnerMemory:
    """Bytes on one rank at the peak of a step."""

    weights: float
    gradients: float
    """What is kept of them from one micro-batch to the next."""
    optimizer: float
    reference: float
    activations: float
    """What the forward pass keeps."""
    backward: float
    """What the backward pass has on top at its peak: at the head, or in a layer."""
    update: float
    """What the optimizer's step has on top. Activations are gone by then."""
    buffers: float
    framework: float

    @property
    def total(self) -> float:
        states = self.weights + self.gradients + self.optimizer + self.reference
        return (
            states
            + max(self.activations + self.backward, self.update)
            + self.buffers
            + self.framework
        )


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Bytes on one GPU of an actor, and how many episodes its cache holds."""

    share: float
    """Share of the GPU's memory that the engine takes."""
    weights: float
    workspace: float
    cache: float
    cache_per_episode: float
    episodes: int
    """Episodes of mean length that the caches of an engine hold, at most the actor's slots."""

    @property
    def total(self) -> float:
        return self.weights + self.workspace + self.cache


def learner_memory(config: RunConfig, shape: ModelShape, learner: Fleet) -> LearnerMemory:
    """Return the memory of one rank (docs/scaling.md, Learner memory)."""
    parameters, trained = float(shape.parameters), trained_parameters(config, shape)
    deepspeed = config.learner.backend == "deepspeed"
    stage, ranks = (config.learner.zero_stage, learner.count) if deepspeed else (1, 1)
    split, sharded = (ranks if stage else 1), (ranks if stage == 3 else 1)
    zero = config.learner.deepspeed.get("zero_optimization", {})
    bucket = float(zero.get("reduce_bucket_size", c.REDUCE_BUCKET.value))
    filled = min(bucket, trained)  # what of a bucket is reduced at once
    # The largest gradient, whole on every rank.
    table = 0 if config.lora.rank else shape.vocabulary * shape.hidden
    sums = {0: 2 * trained, 1: 4 * trained}.get(stage, 4 * trained / split)
    staged = {2: 2 * bucket, 3: 4 * bucket}.get(stage, 0.0)
    reduced = 4 * filled if stage > 1 else 0.0
    update = {
        0: max(4 * trained, 6 * min(trained, c.REDUCE_BUCKET.value)),
        2: 8.0 * min(table, trained / split),
        3: 4 * min(trained / split, float(zero.get("sub_group_size", c.SUB_GROUP.value))),
    }.get(stage, 0.0)
    live = min(float(zero.get("stage3_max_live_parameters", c.LIVE_PARAMETERS.value)), parameters)
    gathered = 2 * live if sharded > 1 else 0.0
    tokens, layer = config.learner.micro_batch_tokens, layer_activations(shape)
    # A chunk of logits and their gradient.
    chunk = (c.LOGITS_CPU if learner.accelerator.is_cpu else c.LOGITS).value
    logits = 2 * min(chunk, 2.0 * tokens * shape.vocabulary)
    recomputed = config.learner.gradient_checkpointing
    held = tokens * shape.layers * (2 * shape.hidden if recomputed else layer)
    at_head = tokens * c.SAVED_TAIL.value * shape.hidden + max(
        6 * table, 4 * table + logits, reduced
    )
    in_layer = tokens * (
        c.LAYER_GRADIENTS.value * shape.feed_forward + 2 * shape.hidden + layer * recomputed
    )
    in_layer += reduced + (2 * table if shape.tied else 0)
    return LearnerMemory(
        weights=2 * parameters / sharded,
        gradients=sums,
        optimizer=12 * trained / split,
        reference=2 * parameters / sharded if config.objective.needs_reference else 0.0,
        activations=held,
        backward=max(at_head, in_layer),
        update=update,
        buffers=staged + gathered,
        framework=(c.FRAMEWORK_CPU if learner.accelerator.is_cpu else c.FRAMEWORK).value,
    )


def layer_activations(shape: ModelShape) -> float:
    """Return the bytes per token that a layer keeps for its backward pass."""
    kept = c.SAVED_HIDDEN.value * shape.hidden + c.SAVED_KV.value * shape.kv_width
    return kept + c.SAVED_FEED_FORWARD.value * shape.feed_forward


def engine_memory(
    config: RunConfig, shape: ModelShape, actors: Fleet, episode_tokens: float, shared: bool
) -> EngineMemory:
    """Return the memory of one GPU of an engine (docs/scaling.md, Actor memory)."""
    split, cpu = config.actor.tensor_parallel, actors.accelerator.is_cpu
    share = config.actor.memory_share(shared=shared)
    weights = 2.0 * shape.parameters / split
    workspace = 0.0 if cpu else c.ENGINE_WORKSPACE.value
    if cpu:
        cache = float(config.actor.kv_cache_mib << 20)
    else:
        cache = actors.accelerator.memory_bytes * share - weights - workspace
    # A key-value head cannot be cut: with more GPUs than heads each keeps a copy. Heads have at least 64 dimensions.
    per_episode = episode_tokens * shape.kv_bytes_per_token / split
    fitting = max(0, int(cache / per_episode))
    return EngineMemory(
        share, weights, workspace, max(0.0, cache), per_episode, min(fitting, config.actor.slots)
    )


def trained_parameters(config: RunConfig, shape: ModelShape) -> float:
    """Return the number of parameters in training: all, or those of the adapters."""
    rank = config.lora.rank
    if not rank:
        return float(shape.parameters)
    wide = 2 * shape.hidden + 2 * shape.query_width + 2 * (shape.hidden + shape.kv_width)
    return float(rank * shape.layers * (wide + 3 * (shape.hidden + shape.feed_forward)))
