"""What a run needs and how fast it goes, from the recipe, the model's shape and the machines: pure functions.

docs/scaling.md has the large terms. N are the model's parameters, R the learner's ranks; sizes are bytes.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from horizonrl.common.config.schema import ALONE_SHARE, LARGEST_SHARED, RunConfig
from horizonrl.common.errors import ConfigError
from horizonrl.learner.disk import disk_need
from horizonrl.ops.plan import constants as c
from horizonrl.ops.plan.hardware import Fleet
from horizonrl.ops.plan.memory import (
    EngineMemory,
    LearnerMemory,
    engine_memory,
    learner_memory,
    trained_parameters,
)
from horizonrl.ops.plan.shapes import ModelShape
from horizonrl.ops.plan.versions import VersionTime, version_time


@dataclass(frozen=True, slots=True)
class Workload:
    """What one episode is, on average."""

    episode_tokens: float
    generated_tokens: float

    @classmethod
    def of(
        cls,
        config: RunConfig,
        episode_tokens: float | None = None,
        generated_tokens: float | None = None,
    ) -> "Workload":
        """Fill in what is not given from the recipe's bounds. Raises ConfigError for more than an episode can hold."""
        most = config.model.max_context_tokens
        tokens = episode_tokens if episode_tokens is not None else c.EPISODE_FILL.value * most
        share = c.GENERATED_SHARE.value * tokens
        generated = (
            generated_tokens
            if generated_tokens is not None
            else min(share, config.longest_episode_tokens)
        )
        if not 0 < tokens <= most:
            raise ConfigError(
                f"--episode-tokens is {tokens:g}: give a number up to model.max_context_tokens = {most}"
            )
        if not 0 < generated <= tokens:
            raise ConfigError(
                f"--generated-tokens is {generated:g} of {tokens:g} tokens in an episode: give fewer"
            )
        return cls(tokens, generated)


@dataclass(frozen=True, slots=True)
class RunPlan:
    """All that `horizonrl plan` prints. Rates are per second."""

    learner: LearnerMemory
    engine: EngineMemory
    gpu_bytes: float
    """What the fullest GPU of the learner needs, with an engine that shares it."""
    version: VersionTime
    step_s: float
    """Seconds of the learner for one step, while nothing else holds it up."""
    sampling_s: float
    """Seconds of the actors for the groups of one step, while nothing else holds them up."""
    learner_tokens: float
    """What the learner could train: prompts and observations too."""
    learner_generated: float
    """Those of them that were generated."""
    actor_tokens: float
    """What the actors could read and generate."""
    actor_generated: float
    group_bytes: float
    frame_bytes: float
    change_bytes: float
    hosts: int
    """Hosts of actors, each of which downloads a version once."""
    weights_bytes_per_s: float
    """What the broker sends to all hosts."""
    broker_bytes: float
    """What the broker stores at most: weights and the log."""
    checkpoint_bytes: float
    disk_bytes: float
    capacities: dict[str, float]
    """Groups per second that each part carries, by part."""
    troubles: list[str] = field(default_factory=list)
    """What does not fit, or not together."""
    hints: list[str] = field(default_factory=list)
    """What could be smaller, and what has to be larger elsewhere."""

    @property
    def bottleneck(self) -> str:
        return min(self.capacities, key=self.capacities.__getitem__)

    @property
    def groups(self) -> float:
        """Groups per second of the whole run: those of its slowest part."""
        return self.capacities[self.bottleneck]

    def busy(self, part: str) -> float:
        return self.groups / self.capacities[part]


def plan_run(
    config: RunConfig, shape: ModelShape, learner: Fleet, actors: Fleet | None, load: Workload
) -> RunPlan:
    """Compute the plan; without `actors` they share the learner's GPUs, as `train` has it on one machine.

    Raises ConfigError if the actors' GPUs do not make up one engine.
    """
    shared = actors is None
    if actors is None:
        wanted = config.actor.count * config.actor.tensor_parallel
        actors = Fleet(min(learner.count, wanted), learner.accelerator)
    if actors.count < config.actor.tensor_parallel:
        raise ConfigError(
            f"--actors is {actors} but actor.tensor_parallel is {config.actor.tensor_parallel}: one engine needs that "
            "many"
        )
    n, per_step = config.rollout.group_size, config.rl.groups_per_step
    memory = learner_memory(config, shape, learner)
    engine = engine_memory(config, shape, actors, load.episode_tokens, shared)
    disk = disk_need(config, shape.parameters, trained_parameters(config, shape))
    version = version_time(config, shape, (learner, actors), engine, disk.checkpoint)
    step_s = learner_step_s(config, shape, learner, load)
    episodes_per_s = actor_episodes_per_s(config, shape, actors, load, engine)
    frame = 2.0 * shape.parameters
    change = frame / change_ratio(config.rl.lr)
    if config.lora.rank:
        # The adapters whole, in bfloat16: their changes are no larger.
        change = 2.0 * trained_parameters(config, shape)
    hosts = math.ceil(actors.count / c.GPUS_PER_HOST.value)
    per_version = hosts * (change + frame / c.KEY_FRAME_EVERY.value) / config.rl.publish_every
    group = group_bytes(n, load)
    learner_s = step_s + version.copy_s + version.checkpoint_s / config.learner.checkpoint_every
    sampling_s = per_step * n / episodes_per_s
    actors_s = sampling_s + version.pause_s / config.rl.publish_every
    roles = {"learner": per_step / learner_s, "actors": per_step / actors_s}
    if shared:
        roles = {"learner and actors": per_step / (learner_s + actors_s)}
    capacities = roles | {
        "publishing": per_step / version.publish_s,
        "broker": min(c.BROKER_GROUPS.value, c.BROKER_BYTES.value / group),
        "reading groups": 1.0 / (group * c.DECODE_GROUP.value),
        "weights": per_step * c.HOST_LINK.value / per_version,
    }
    plan = RunPlan(
        learner=memory,
        engine=engine,
        gpu_bytes=memory.total + (engine.total if shared else 0.0),
        version=version,
        step_s=step_s,
        sampling_s=sampling_s,
        learner_tokens=per_step * n * load.episode_tokens / learner_s,
        learner_generated=per_step * n * load.generated_tokens / learner_s,
        actor_tokens=per_step * n * load.episode_tokens / actors_s,
        actor_generated=per_step * n * load.generated_tokens / actors_s,
        group_bytes=group,
        frame_bytes=frame,
        change_bytes=change,
        hosts=hosts,
        weights_bytes_per_s=per_version * min(capacities.values()) / per_step,
        broker_bytes=c.FRAMES_STORED.value * frame + config.broker.max_log_bytes,
        checkpoint_bytes=disk.checkpoint,
        disk_bytes=disk.total + config.broker.max_log_bytes,
        capacities=capacities,
    )
    plan.troubles.extend(_troubles(config, learner, actors, plan))
    plan.hints.extend(_hints(config, learner, actors, shared, plan))
    return plan


def learner_step_s(config: RunConfig, shape: ModelShape, learner: Fleet, load: Workload) -> float:
    """Return the seconds of one step: arithmetic, or the traffic of ZeRO between the ranks where that takes longer."""
    tokens = config.rl.groups_per_step * config.rollout.group_size * load.episode_tokens
    forward = shape.forward_flops(
        load.episode_tokens / 2, load.generated_tokens / load.episode_tokens
    )
    passes = (
        4.0 if config.learner.gradient_checkpointing else 3.0
    ) * config.loss.epochs + _scoring_passes(config)
    peak = learner.count * learner.accelerator.flops * c.TRAIN_UTILISATION.value
    return max(tokens * forward * passes / peak, _traffic_s(config, shape, learner, tokens))


def _scoring_passes(config: RunConfig) -> int:
    """Return how often a batch is scored before the step: by the policy, and by the reference."""
    return config.objective.needs_scores + config.objective.needs_reference


def _traffic_s(config: RunConfig, shape: ModelShape, learner: Fleet, tokens: float) -> float:
    if learner.count == 1 or learner.accelerator.is_cpu:
        return 0.0
    link = c.rank_link(learner.count)
    updates, trained = config.loss.updates, trained_parameters(config, shape)
    micro_batches = math.ceil(
        tokens * config.loss.epochs / (learner.count * config.learner.micro_batch_tokens)
    )
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
    machine_cost = load.generated_tokens * c.GENERATED_TOKEN.value + other * c.OTHER_TOKEN.value
    return episodes * (machine_cost + c.EPISODE_TURNS.value * c.TURN.value)


def _troubles(config: RunConfig, learner: Fleet, actors: Fleet, plan: RunPlan) -> Iterator[str]:
    """Yield what does not fit. Advice leaves out what the recipe has already."""
    engine, gpu = plan.engine, learner.accelerator
    cut_finely = config.learner.micro_batch_tokens == config.model.max_context_tokens
    if plan.gpu_bytes > gpu.memory_bytes:
        with_engine = (
            f" with {engine.total / 1e9:.1f} GB for an engine"
            if plan.gpu_bytes > plan.learner.total
            else ""
        )
        advice = [
            "a higher learner.zero_stage" * (config.learner.zero_stage < 3),
            "more ranks",
            "learner.gradient_checkpointing" * (not config.learner.gradient_checkpointing),
            "a smaller learner.micro_batch_tokens" * (not cut_finely),
            "a smaller actor.gpu_memory_share" * bool(with_engine),
            "GPUs with more memory",
        ]
        yield (
            f"a learner's rank needs {plan.gpu_bytes / 1e9:.1f} GB{with_engine} but {gpu.name} has "
            f"{gpu.memory_bytes / 1e9:.0f} GB: use {' or '.join(filter(None, advice))}"
        )
    if engine.episodes == 0:
        yield (
            f"an engine has no room for one episode ({engine.cache_per_episode / 1e9:.2f} GB of cache) after its "
            f"weights: raise actor.gpu_memory_share (now {engine.share:g}) or actor.tensor_parallel"
        )
    elif engine.episodes < config.rollout.group_size:
        yield (
            f"an engine's cache holds {engine.episodes} episodes but rollout.group_size is "
            f"{config.rollout.group_size}: the others of a group wait"
        )
    if learner.count != config.learner.ranks:
        yield (
            f"the recipe has learner.ranks = {config.learner.ranks}, and this plan {learner.count}: set it to "
            f"{learner.count}"
        )
    if unused := actors.count % config.actor.tensor_parallel:
        yield f"{unused} of the actors' GPUs make up no engine of {config.actor.tensor_parallel}"


def _hints(
    config: RunConfig, learner: Fleet, actors: Fleet, shared: bool, plan: RunPlan
) -> Iterator[str]:
    for fleet in {learner.accelerator: learner, actors.accelerator: actors}.values():
        if not fleet.accelerator.supported:
            yield f"HorizonRL runs on NVIDIA's GPUs: for {fleet.accelerator.name} this is arithmetic"
    if not shared and not actors.accelerator.is_cpu:
        split = config.actor.tensor_parallel
        # More GPUs sample faster, and no engine loads a version faster for it.
        pause_s = plan.version.pause_s / config.rl.publish_every
        share = plan.sampling_s / (config.rl.groups_per_step / plan.groups - pause_s)
        enough = math.ceil(actors.count * share / split) * split
        if enough <= actors.count / 2:
            yield f"actors are busy for {plan.busy('actors'):.0%} of the time: {enough} of their GPUs would do"
        if plan.engine.share <= LARGEST_SHARED:
            yield (
                f"actor.gpu_memory_share is {plan.engine.share:g}, but these actors have GPUs of their own: leave it "
                f"out, and it is {ALONE_SHARE:g}"
            )
    if not shared and learner.count > 1 and plan.busy("learner") <= 0.5:
        yield (
            f"the learner is busy for {plan.busy('learner'):.0%} of the time: plan it with fewer ranks, if they have "
            "the memory"
        )
    if plan.broker_bytes > c.BROKER_STORE.value:
        yield (
            f"a broker in Kubernetes needs a store of {plan.broker_bytes / 1e9:.0f} GB, and "
            f"{c.BROKER_STORE.value / 1e9:.0f} GB are the default: raise fileStore in nats/values.yaml"
        )
