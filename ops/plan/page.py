"""The plan as tables on the terminal, and as JSON."""

import json
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from horizonrl.common.config.schema import RunConfig
from horizonrl.ops.cli.terminal import plain_console
from horizonrl.ops.plan import constants
from horizonrl.ops.plan.estimate import RunPlan, Workload, plan_run
from horizonrl.ops.plan.hardware import Fleet
from horizonrl.ops.plan.shapes import ModelShape, shape_of_directory, shape_of_name, shape_of_size
from horizonrl.ops.run.models import known_model


def run(
    config: RunConfig,
    machines: tuple[str, str],
    size: str | None,
    tokens: tuple[float | None, float | None],
    json_file: Path | None,
) -> int:
    """Print the plan for the machines of learner and actors; return 0, or 1 if something does not fit."""
    fleets = Fleet.parse(machines[0], "--learner"), Fleet.parse(machines[1], "--actors")
    shape, load = model_shape(config, size), Workload.of(config, *tokens)
    plan = plan_run(config, shape, *fleets, load)
    _print(config, shape, fleets, load, plan)
    if json_file is not None:
        json_file.write_text(json.dumps(as_json(shape, fleets, load, plan), indent=2) + "\n", encoding="utf-8")
    return 1 if plan.learner.total > fleets[0].accelerator.memory_bytes or plan.engine.episodes == 0 else 0


def model_shape(config: RunConfig, size: str | None) -> ModelShape:
    """Return the shape of --model-size, of the model's directory if it is here, or of the size in its name."""
    if size is not None:
        return shape_of_size(size)
    found = known_model(config.model.name)
    return shape_of_directory(found) if found is not None else shape_of_name(config.model.name)


def as_json(shape: ModelShape, fleets: tuple[Fleet, Fleet], load: Workload, plan: RunPlan) -> dict[str, object]:
    return {
        "model": {"name": shape.name, "parameters": shape.parameters},
        "learner": str(fleets[0]),
        "actors": str(fleets[1]),
        "workload": asdict(load),
        "plan": asdict(plan) | {"learner_total": plan.learner.total, "groups_per_s": plan.groups},
        "bottleneck": plan.bottleneck,
        "constants": {name: asdict(constant) for name, constant in constants.table().items()},
    }


def _print(config: RunConfig, shape: ModelShape, fleets: tuple[Fleet, Fleet], load: Workload, plan: RunPlan) -> None:
    console, memory, engine = plain_console(), plan.learner, plan.engine
    console.print(
        f"{shape.name}, {shape.parameters / 1e9:.2f} billion parameters; learner {fleets[0]}, actors {fleets[1]}; "
        f"episodes of {load.episode_tokens:.0f} tokens, {load.generated_tokens:.0f} of them generated"
    )
    table = Table("memory", "GB", "of", title="a rank of the learner, and a GPU of an actor")
    stage = f"ZeRO {config.learner.zero_stage}"
    for name, value, note in (
        ("learner: weights", memory.weights, stage),
        ("learner: gradients", memory.gradients, stage),
        ("learner: optimizer", memory.optimizer, "float32 masters and two moments"),
        ("learner: reference", memory.reference, stage),
        ("learner: activations", memory.activations, f"{config.learner.micro_batch_tokens} tokens"),
        ("learner: logits", memory.logits, "one chunk and its gradient"),
        ("learner: buffers", memory.buffers + memory.framework, "gathered parameters, framework"),
        ("learner: all", memory.total, f"{fleets[0].accelerator.memory_bytes / 1e9:.0f} GB"),
        ("actor: weights", engine.weights, f"tensor_parallel {config.actor.tensor_parallel}"),
        ("actor: cache", engine.cache, f"{engine.episodes} episodes of {engine.cache_per_episode / 1e9:.3f} GB"),
    ):
        table.add_row(name, f"{value / 1e9:.2f}", note)
    console.print(table)
    table = Table("flow", "value", "note")
    interval = config.rl.groups_per_step / plan.groups
    step = (f"{interval:.1f} s", f"{config.rl.steps * interval / 3600:.1f} h for rl.steps = {config.rl.steps}")
    if engine.episodes == 0:
        step = ("never", "an actor has no room for one episode")
    for name, text, note in (
        ("learner, trained", f"{plan.learner_tokens:,.0f} tokens/s", f"{plan.step_s:.1f} s per step if never waiting"),
        ("actors, generated", f"{plan.actor_tokens:,.0f} tokens/s", "without the environments' time"),
        ("broker", f"{plan.groups:.2f} groups/s", f"{plan.group_bytes / 1e3:.0f} kB each"),
        ("step", *step),
        ("key frame", f"{plan.frame_bytes / 1e9:.2f} GB", "when an actor begins, and every 64 versions"),
        ("changes", f"{plan.change_bytes / 1e6:.1f} MB", f"per version at a learning rate of {config.rl.lr:g}"),
        ("weights sent", f"{plan.weights_bytes_per_s / 1e6:.1f} MB/s", "to all hosts, one download each"),
        ("checkpoint", f"{plan.checkpoint_bytes / 1e9:.1f} GB", "each"),
        ("disk", f"{plan.disk_bytes / 1e9:.0f} GB", "checkpoints, frames, episodes and log at their bounds"),
    ):
        table.add_row(name, text, note)
    console.print(table)
    table = Table("part", "groups/s", "busy", title="what limits the run")
    for name, capacity in sorted(plan.capacities.items(), key=lambda item: item[1]):
        table.add_row(name, f"{capacity:,.2f}", f"{plan.groups / capacity:.0%}")
    console.print(table)
    console.print(f"First bottleneck: {plan.bottleneck}.")
    for trouble in plan.troubles:
        console.print(f"Note: {trouble}.")
    console.print("Formulas, their constants and what has not been measured: docs/scaling.md")
