"""The plan as tables on the terminal, and as JSON."""

import json
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from horizonrl.common.config.schema import RunConfig
from horizonrl.ops.models.models import known_model
from horizonrl.ops.plan import constants
from horizonrl.ops.plan.estimate import RunPlan, Workload, plan_run
from horizonrl.ops.plan.hardware import Fleet
from horizonrl.ops.plan.shapes import ModelShape, shape_of_directory, shape_of_name, shape_of_size
from horizonrl.ops.terminal.console import plain_console

Fleets = tuple[Fleet, Fleet | None]
"""The machines of the learner and of the actors, which share the learner's if they have none."""
SHARED = "shared"


def run(
    config: RunConfig,
    machines: tuple[str, str | None],
    size: str | None,
    tokens: tuple[float | None, float | None],
    json_file: Path | None,
) -> int:
    """Print the plan for the machines of learner and actors; return 0, or 1 if something does not fit."""
    fleets = _fleets(*machines)
    shape, load = model_shape(config, size), Workload.of(config, *tokens)
    plan = plan_run(config, shape, *fleets, load)
    _print(config, shape, fleets, load, plan)
    if json_file is not None:
        json_file.write_text(
            json.dumps(as_json(shape, fleets, load, plan), indent=2) + "\n", encoding="utf-8"
        )
    return (
        1 if plan.gpu_bytes > fleets[0].accelerator.memory_bytes or plan.engine.episodes == 0 else 0
    )


def _fleets(learner: str, actors: str | None) -> Fleets:
    """Read the two options. Actors share the learner's GPUs unless they are given some; a core is never shared."""
    training = Fleet.parse(learner, "--learner")
    if actors is not None and actors != SHARED:
        return training, Fleet.parse(actors, "--actors")
    return training, Fleet(1, training.accelerator) if training.accelerator.is_cpu else None


def model_shape(config: RunConfig, size: str | None) -> ModelShape:
    """Return the shape of --model-size, of the model's directory if it is here, or of the size in its name."""
    if size is not None:
        return shape_of_size(size)
    model = known_model(config.model.name)
    return shape_of_directory(model) if model is not None else shape_of_name(config.model.name)


def as_json(shape: ModelShape, fleets: Fleets, load: Workload, plan: RunPlan) -> dict[str, object]:
    return {
        "model": {"name": shape.name, "parameters": shape.parameters},
        "learner": str(fleets[0]),
        "actors": _actors(fleets),
        "workload": asdict(load),
        "plan": asdict(plan) | {"learner_total": plan.learner.total, "groups_per_s": plan.groups},
        "bottleneck": plan.bottleneck,
        "constants": {name: asdict(constant) for name, constant in constants.table().items()},
    }


def _actors(fleets: Fleets) -> str:
    return "on the learner's GPUs" if fleets[1] is None else str(fleets[1])


def _print(
    config: RunConfig, shape: ModelShape, fleets: Fleets, load: Workload, plan: RunPlan
) -> None:
    console, memory, engine, version = plain_console(), plan.learner, plan.engine, plan.version
    console.print(
        f"{shape.name}, {shape.parameters / 1e9:.2f} billion parameters; "
        f"learner {fleets[0]}, actors {_actors(fleets)}; episodes of "
        f"{load.episode_tokens:.0f} tokens, {load.generated_tokens:.0f} of them generated"
    )
    table = Table("memory", "GB", "of", title="a rank of the learner, and a GPU of an actor")
    stage = f"ZeRO {config.learner.zero_stage}"
    for name, value, note in (
        ("learner: weights", memory.weights, stage),
        ("learner: gradients", memory.gradients, stage),
        ("learner: optimizer", memory.optimizer, "float32 masters and two moments"),
        ("learner: reference", memory.reference, stage),
        ("learner: activations", memory.activations, f"{config.learner.micro_batch_tokens} tokens"),
        ("learner: backward pass", memory.backward, "on top of them at its peak"),
        ("learner: update", memory.update, "instead of these two, where it is more"),
        ("learner: buffers", memory.buffers + memory.framework, "of ZeRO and of the framework"),
        ("learner: all", memory.total, f"{fleets[0].accelerator.memory_bytes / 1e9:.0f} GB"),
        ("actor: weights", engine.weights, f"tensor_parallel {config.actor.tensor_parallel}"),
        (
            "actor: cache",
            engine.cache,
            f"{engine.episodes} episodes of {engine.cache_per_episode / 1e9:.3f} GB",
        ),
        ("actor: all", engine.total, f"actor.gpu_memory_share {engine.share:g}"),
    ):
        table.add_row(name, f"{value / 1e9:.2f}", note)
    console.print(table)
    table = Table("flow", "value", "note")
    interval = config.rl.groups_per_step / plan.groups
    step = (
        f"{interval:.1f} s",
        f"{config.rl.steps * interval / 3600:.1f} h for rl.steps = {config.rl.steps}",
    )
    if engine.episodes == 0:
        step = ("never", "an actor has no room for one episode")
    for name, text, note in (
        ("learner at full speed", *_rates(plan.learner_generated, plan.learner_tokens, "trained")),
        (
            "actors at full speed",
            *_rates(plan.actor_generated, plan.actor_tokens, "read or generated"),
        ),
        ("broker", f"{plan.groups:.2f} groups/s", f"{plan.group_bytes / 1e3:.0f} kB each"),
        ("step", *step),
        ("learner, its step", f"{plan.step_s:.1f} s", "without waiting, versions and checkpoints"),
        (
            "version, learner",
            f"{version.copy_s:.1f} s",
            f"and {version.publish_s:.1f} s in parallel",
        ),
        (
            "version, engine",
            f"{version.pause_s:.1f} s",
            f"{version.load_s:.1f} s to load, {version.refill_s:.1f} s to read episodes again",
        ),
        ("version, host", f"{version.receive_s:.1f} s", "to patch and digest, beside generation"),
        (
            "key frame",
            f"{plan.frame_bytes / 1e9:.2f} GB",
            "when an actor begins, and every 64 versions",
        ),
        (
            "changes",
            f"{plan.change_bytes / 1e6:.1f} MB",
            f"per version at a learning rate of {config.rl.lr:g}",
        ),
        (
            "weights sent",
            f"{plan.weights_bytes_per_s / 1e6:.1f} MB/s",
            f"to hosts of 8 GPUs: {plan.hosts}",
        ),
        (
            "checkpoint",
            f"{plan.checkpoint_bytes / 1e9:.1f} GB",
            f"{version.checkpoint_s:.0f} s, every {config.learner.checkpoint_every} steps",
        ),
        (
            "disk, learner",
            f"{plan.disk_bytes / 1e9:.0f} GB",
            "checkpoints, frames, episodes and log at their bounds",
        ),
        (
            "disk, broker",
            f"{plan.broker_bytes / 1e9:.0f} GB",
            "four times the weights, and the log at its bound",
        ),
        (
            "/dev/shm, actor",
            f"{2 * plan.frame_bytes / 1e9:.1f} GB",
            "two versions, part of its host memory",
        ),
    ):
        table.add_row(name, text, note)
    console.print(table)
    table = Table("part", "groups/s", "busy", title="what limits the run")
    for name, capacity in sorted(plan.capacities.items(), key=lambda item: item[1]):
        table.add_row(name, f"{capacity:,.2f}", f"{plan.groups / capacity:.0%}")
    console.print(table)
    console.print(f"First bottleneck: {plan.bottleneck}.")
    for note in (*plan.troubles, *plan.hints):
        console.print(f"Note: {note}.")
    console.print(
        "The large terms, their constants and what has not been measured: docs/scaling.md"
    )


def _rates(generated: float, all_tokens: float, what: str) -> tuple[str, str]:
    return (
        f"{generated:,.0f} generated tokens/s",
        f"{all_tokens:,.0f} with prompts and observations, {what}",
    )
