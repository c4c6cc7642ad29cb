"""`horizonrl export`: a run's newest or best weights as a Hugging Face directory, with its model card."""

from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from horizonrl.common.config.schema import RunConfig
from horizonrl.common.errors import CheckpointError
from horizonrl.common.run_dir import BEST
from horizonrl.envs.registry import GROUP
from horizonrl.learner.records.best import Best
from horizonrl.learner.records.checkpoint import CheckpointStore
from horizonrl.ops.models.models import resolve_model
from horizonrl.ops.rundir.directory import read_config
from horizonrl.ops.rundir.episodes import EpisodeFiles
from horizonrl.ops.rundir.files import Files, evaluated_split


def export_run(run_dir: Path, out: Path, *, best: bool = False) -> int:
    """Write a run's newest checkpoint, or its best version, as a Hugging Face directory; return its step."""
    config = read_config(run_dir)
    weights, facts = (
        _find_best(run_dir) if best else _find_newest(run_dir, config.learner.keep_checkpoints)
    )
    write_model(run_dir, config, weights, out, facts)
    return int(facts["step"])


def write_model(
    run_dir: Path, config: RunConfig, weights: Path, out: Path, facts: Mapping[str, Any]
) -> None:
    """Write weights of a run as a Hugging Face directory; `facts` say which."""
    # Torch and huggingface_hub: seconds to import.
    from horizonrl.learner.engine.checkpoint.model_directory import write_model_dir
    from horizonrl.ops.publish.card import model_card

    facts = {**facts, "run": config.run.name, "environments": [env.id for env in config.envs]}
    model_dir, files = resolve_model(config.model.name), Files.read(run_dir)
    prompt = example_prompt(config, run_dir)
    write_model_dir(
        model_dir,
        weights,
        out,
        facts,
        lambda written: model_card(config, files, model_dir, written, prompt),
    )


def example_prompt(config: RunConfig, run_dir: Path) -> str | None:
    """Return the first message of an episode that the run keeps, of an environment whose texts are public.

    Those are the ones that HorizonRL brings, without options, which may name data of the user.
    """
    entries = entry_points(group=GROUP)
    built_in = {entry.name for entry in entries if entry.value.startswith("horizonrl.envs.worlds.")}
    public = {env.id for env in config.envs if env.id in built_in and not env.options}
    groups = EpisodeFiles(run_dir, held_out=True).groups() if public else ()
    return next(
        (str(records[0]["prompt"]) for _, _, records in groups if records[0]["env"] in public), None
    )


def _find_newest(run_dir: Path, keep: int) -> tuple[Path, dict[str, Any]]:
    checkpoint = CheckpointStore(run_dir / "checkpoints", keep=keep).newest()
    if checkpoint is None:
        raise CheckpointError(f"{run_dir} holds no checkpoint yet: wait for the first one")
    return checkpoint.path / "weights.safetensors", {
        key: checkpoint.state[key] for key in ("step", "lineage")
    }


def _find_best(run_dir: Path) -> tuple[Path, dict[str, Any]]:
    best = Best(run_dir / BEST)
    result = best.read()
    if result is None:
        raise CheckpointError(
            f"{run_dir} holds no evaluated version: set eval.every, or export without --best"
        )
    facts = {key: result[key] for key in ("step", "lineage", "success_rate", "low", "high")}
    return best.weights(result), facts | {"split": evaluated_split(result)}
