"""What a run needs and how fast it goes, from the recipe, the model's shape and the machines: pure functions.

docs/scaling.md derives each formula. N are the model's parameters, R the learner's ranks; sizes are bytes.
"""

import math
from dataclasses import dataclass, field

from horizonrl.common.config.schema import RunConfig
from horizonrl.common.errors import ConfigError
from horizonrl.learner.records.disk import disk_need
from horizonrl.ops.plan import constants as c
from horizonrl.ops.plan.hardware import Fleet
from horizonrl.ops.plan.shapes import ModelShape


@dataclass(frozen=True, slots=True)
class Workload:
    """What one episode is, on average."""

    episode_tokens: float
    generated_tokens: float

    @classmethod
    def of(
        cls, config: RunConfig, episode_tokens: float | None = None, generated_tokens: float | None = None
    ) -> "Workload":
        """Fill in what is not given from the recipe's bounds. Raises ConfigError for more than an episode can hold."""
        most = config.model.max_context_tokens
        tokens = episode_tokens if episode_tokens is not None else c.EPISODE_FILL.value * most
        share = c.GENERATED_SHARE.value * tokens
        generated = generated_tokens if generated_tokens is not None else min(share, config.longest_episode_tokens)
        if not 0 < tokens <= most:
            raise ConfigError(f"--episode-tokens is {tokens:g}: give a number up to model.max_context_tokens = {most}")
        if not 0 < generated <= tokens:
            raise ConfigError(f"--generated-tokens is {generated:g} of {tokens:g} tokens in an episode: give fewer")
        return cls(tokens, generated)


@dataclass(frozen=True, slots=True)
class LearnerMemory:
    """Bytes on one rank at the peak of a step."""

    weights: float
    gradients: float
    optimizer: float
    reference: float
    activations: float
    logits: float
    buffers: float
    framework: float

    @property
    def total(self) -> float:
        parts = (self.weights, self.gradients, self.optimizer, self.reference, self.activations)
        return sum(parts) + self.logits + self.buffers + self.framework


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Bytes on one GPU of an actor, and how many episodes its cache holds."""

    weights: float
    workspace: float
    cache: float
    cache_per_episode: float
    episodes: int
    """Episodes of mean length that the caches of an engine hold, at most the actor's slots."""


@dataclass(frozen=True, slots=True)
class RunPlan:
    """All that `horizonrl plan` prints. Rates are per second."""

    learner: LearnerMemory
    engine: EngineMemory
    learner_tokens: float
    step_s: float
    """Seconds of the learner for one step, while nothing else holds it up."""
    actor_tokens: float
    """Generated tokens of all actors."""
    group_bytes: float
    frame_bytes: float
    change_bytes: float
    weights_bytes_per_s: float
    """What the broker sends to all hosts."""
    checkpoint_bytes: float
    disk_bytes: float
    capacities: dict[str, float]
    """Groups per second that each part carries, by part."""
    troubles: list[str] = field(default_factory=list)

    @property
    def bottleneck(self) -> str:
        return min(self.capacities, key=self.capacities.__getitem__)

    @property
    def groups(self) -> float:
        """Groups per second of the whole run: those of its slowest part."""
        return self.capacities[self.bottleneck]


def plan_run(config: RunConfig, shape: ModelShape, learner: Fleet, actors: Fleet, load: Workload) -> RunPlan:
    """Compute the plan. Raises ConfigError if the actors' GPUs do not make up one engine."""
    ranks, n, per_step = learner.count, config.rollout.group_size, config.rl.groups_per_step
    if actors.count < config.actor.tensor_parallel:
        raise ConfigError(
            f"--actors is {actors} but actor.tensor_parallel is {config.actor.tensor_parallel}: one engine needs that "
            "many"
        )
    memory, engine = learner_memory(config, shape, learner), engine_memory(config, shape, actors, load)
    step_s = learner_step_s(config, shape, learner, load)
    episodes_per_s = actor_episodes_per_s(config, shape, actors, load, engine)
    frame = 2.0 * shape.parameters
    change = frame / change_ratio(config.rl.lr)
    if config.lora.rank:
        change = 2.0 * _trained(config, shape)  # the adapters whole, in bfloat16: their changes are no larger
    hosts = math.ceil(actors.count / c.GPUS_PER_HOST.value)
    per_version = hosts * (change + frame / c.KEY_FRAME_EVERY.value) / config.rl.publish_every
    group = group_bytes(n, load)
    capacities = {
        "learner": per_step / step_s,
        "actors": episodes_per_s / n,
        "broker": min(c.BROKER_GROUPS.value, c.BROKER_BYTES.value / group),
        "reading groups": 1.0 / (group * c.DECODE_GROUP.value),
        "weights": per_step * c.HOST_LINK.value / per_version,
    }
    disk = disk_need(config, shape.parameters, _trained(config, shape))
    return RunPlan(
        learner=memory,
        engine=engine,
        learner_tokens=per_step * n * load.episode_tokens / step_s,
        step_s=step_s,
        actor_tokens=episodes_per_s * load.generated_tokens,
        group_bytes=group,
        frame_bytes=frame,
        change_bytes=change,
        weights_bytes_per_s=per_version * min(capacities.values()) / per_step,
        checkpoint_bytes=disk.checkpoint,
        disk_bytes=disk.total + config.broker.max_log_bytes,
        capacities=capacities,
        troubles=_troubles(config, shape, learner, actors, memory, engine, ranks),
    )


def learner_memory(config: RunConfig, shape: ModelShape, learner: Fleet) -> LearnerMemory:
    """Return the memory of one rank (docs/scaling.md, Learner memory)."""
    N, R, stage = float(shape.parameters), learner.count, config.learner.zero_stage
    trained, cpu = _trained(config, shape), learner.accelerator.is_cpu
    if config.learner.backend == "torch":
        stage = 1  # float32 masters and gradient sums, whole: as stage 1 with one rank
    split = R if stage else 1
    tokens, width = config.learner.micro_batch_tokens, shape.hidden
    layer = c.SAVED_HIDDEN.value * width + c.SAVED_KV.value * shape.kv_width
    layer += c.SAVED_FEED_FORWARD.value * shape.feed_forward
    saved = shape.layers * 2 * width + layer if config.learner.gradient_checkpointing else shape.layers * layer
    sums = 4 * trained / split if stage else 0.0
    bucket = min(c.REDUCE_BUCKET.value, 2 * trained)
    return LearnerMemory(
        weights=2 * N / (R if stage == 3 else 1),
        gradients=sums + (2 * trained if stage < 2 else bucket),
        optimizer=12 * trained / split,
        reference=2 * N / (R if stage == 3 else 1) if config.objective.needs_reference else 0.0,
        activations=tokens * saved,
        logits=c.LOGITS.value,
        buffers=min(c.LIVE_PARAMETERS.value, 2 * N) if stage == 3 and R > 1 else 0.0,
        framework=(c.FRAMEWORK_CPU if cpu else c.FRAMEWORK).value,
    )


def engine_memory(config: RunConfig, shape: ModelShape, actors: Fleet, load: Workload) -> EngineMemory:
    """Return the memory of one GPU of an engine (docs/scaling.md, Actor memory)."""
    split, cpu = config.actor.tensor_parallel, actors.accelerator.is_cpu
    weights = 2.0 * shape.parameters / split
    workspace = 0.0 if cpu else c.ENGINE_WORKSPACE.value
    if cpu:
        cache = float(config.actor.kv_cache_mib << 20)
    else:
        cache = actors.accelerator.memory_bytes * config.actor.memory_share(shared=False) - weights - workspace
    # A key-value head cannot be cut: with more GPUs than heads each keeps a copy. Heads have at least 64 dimensions.
    per_episode = load.episode_tokens * shape.kv_bytes_per_token / split
    fitting = max(0, int(cache / per_episode))
    return EngineMemory(weights, workspace, max(0.0, cache), per_episode, min(fitting, config.actor.slots))


def learner_step_s(config: RunConfig, shape: ModelShape, learner: Fleet, load: Workload) -> float:
    """Return the seconds of one step: arithmetic, or the traffic of ZeRO between the ranks where that takes longer."""
    tokens = config.rl.groups_per_step * config.rollout.group_size * load.episode_tokens
    forward = shape.forward_flops(load.episode_tokens / 2, load.generated_tokens / load.episode_tokens)
    passes = (4.0 if config.learner.gradient_checkpointing else 3.0) * config.loss.epochs + _scoring_passes(config)
    peak = learner.count * learner.accelerator.flops * c.TRAIN_UTILISATION.value
    return max(tokens * forward * passes / peak, _traffic_s(config, shape, learner, tokens))


def _scoring_passes(config: RunConfig) -> int:
    """Return how often a batch is scored before the step: by the policy, and by the reference."""
    return config.objective.needs_scores + config.objective.needs_reference


def _traffic_s(config: RunConfig, shape: ModelShape, learner: Fleet, tokens: float) -> float:
    if learner.count == 1 or learner.accelerator.is_cpu:
        return 0.0
    link = (c.RANK_LINK if learner.count <= c.GPUS_PER_HOST.value else c.NODE_LINK).value
    updates, trained = config.loss.updates, _trained(config, shape)
    micro_batches = math.ceil(tokens * config.loss.epochs / (learner.count * config.learner.micro_batch_tokens))
    # Gradients travel in float32. Stage 3 gathers the parameters twice per micro-batch and reduces after each, and
    # once where it scores it before the step.
    sums, gathered = 4 * trained, 2.0 * shape.parameters
    if config.learner.zero_stage == 3:
        scored = micro_batches / config.loss.epochs * _scoring_passes(config)
        return (micro_batches * (2 * gathered + sums) + scored * gathered) / link
    if config.learner.zero_stage == 2:
        return (micro_batches * sums + updates * gathered) / link
    return updates * (sums + gathered) / link


def actor_episodes_per_s(
    config: RunConfig, shape: ModelShape, actors: Fleet, load: Workload, engine: EngineMemory
) -> float:
    """Return the episodes per second of all engines, without the environments' time."""
    split, gpu = config.actor.tensor_parallel, actors.accelerator
    if engine.episodes == 0:
        return 1e-9  # it does not fit, which `_troubles` says
    # One decoded token for each of the episodes: the weights and half-filled caches are read once.
    read = 2.0 * shape.parameters / split + engine.episodes * engine.cache_per_episode / 2
    by_bandwidth = read / (gpu.bandwidth * c.BANDWIDTH_UTILISATION.value)
    forward = shape.forward_flops(load.episode_tokens / 2)
    by_arithmetic = engine.episodes * forward / (split * gpu.flops * c.PREFILL_UTILISATION.value)
    token_s = max(by_bandwidth, by_arithmetic) + c.DECODE_OVERHEAD.value
    prefill = (load.episode_tokens - load.generated_tokens) * forward / split
    prefill_s = prefill / (gpu.flops * c.PREFILL_UTILISATION.value)
    return (actors.count // split) / (load.generated_tokens * token_s / engine.episodes + prefill_s)


def change_ratio(lr: float) -> float:
    """Return a frame's bytes over those of the changes at a learning rate, between the rates that were measured."""
    rates = sorted(c.CHANGE_RATIOS)
    if lr <= rates[0] or lr >= rates[-1]:
        return c.CHANGE_RATIOS[rates[0] if lr <= rates[0] else rates[-1]].value
    upper = next(index for index, rate in enumerate(rates) if rate > lr)
    low, high = rates[upper - 1], rates[upper]
    share = math.log(lr / low) / math.log(high / low)
    small, large = (math.log(c.CHANGE_RATIOS[rate].value) for rate in (low, high))
    return math.exp(small + share * (large - small))


def group_bytes(episodes: int, load: Workload) -> float:
    """Return the bytes of a group on the wire."""
    other = load.episode_tokens - load.generated_tokens
    own = load.generated_tokens * c.GENERATED_TOKEN.value + other * c.OTHER_TOKEN.value
    return episodes * (own + c.EPISODE_TURNS.value * c.TURN.value)


def _trained(config: RunConfig, shape: ModelShape) -> float:
    """Return the number of parameters in training: all, or those of the adapters."""
    rank = config.lora.rank
    if not rank:
        return float(shape.parameters)
    wide = 2 * shape.hidden + 2 * shape.query_width + 2 * (shape.hidden + shape.kv_width)
    return float(rank * shape.layers * (wide + 3 * (shape.hidden + shape.feed_forward)))


def _troubles(
    config: RunConfig,
    shape: ModelShape,
    learner: Fleet,
    actors: Fleet,
    memory: LearnerMemory,
    engine: EngineMemory,
    ranks: int,
) -> list[str]:
    troubles = []
    if memory.total > learner.accelerator.memory_bytes:
        troubles.append(
            f"a learner's rank needs {memory.total / 1e9:.1f} GB but {learner.accelerator.name} has "
            f"{learner.accelerator.memory_bytes / 1e9:.0f} GB: use a higher learner.zero_stage, more ranks, "
            "learner.gradient_checkpointing or a smaller learner.micro_batch_tokens"
        )
    if engine.episodes == 0:
        troubles.append(
            f"an engine has no room for one episode ({engine.cache_per_episode / 1e9:.2f} GB of cache) after its "
            f"weights: raise actor.gpu_memory_share (now {config.actor.memory_share(shared=False):g}) or "
            "actor.tensor_parallel"
        )
    elif engine.episodes < config.rollout.group_size:
        troubles.append(
            f"an engine's cache holds {engine.episodes} episodes but rollout.group_size is "
            f"{config.rollout.group_size}: the others of a group wait"
        )
    if ranks != config.learner.ranks:
        troubles.append(
            f"the recipe has learner.ranks = {config.learner.ranks}, and this plan {ranks}: set it to {ranks}"
        )
    if unused := actors.count % config.actor.tensor_parallel:
        troubles.append(f"{unused} of the actors' GPUs make up no engine of {config.actor.tensor_parallel}")
    return troubles
