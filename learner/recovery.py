"""What a learner makes sure of before it speaks for a run: that it can go on from where the run stands.

Whoever speaks ends the learner that spoke before. So all that can fail is tried first, and changes nothing.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from horizonrl.common.errors import CheckpointMismatch
from horizonrl.common.state import Progress
from horizonrl.learner.records.checkpoint import Checkpoint


def check_directory(run_dir: Path, began_here: bool, earlier: Progress | None) -> None:
    """Raise CheckpointMismatch for an empty run directory when the run has been trained already, somewhere else."""
    if earlier is not None and earlier.step and not began_here:
        raise CheckpointMismatch(
            f"the broker knows this run at step {earlier.step}, but {run_dir} holds nothing of it: give the run.root "
            "that it was trained in, restore that directory, or give the run another run.name"
        )


def place_in_log(checkpoint: Checkpoint) -> tuple[int, str]:
    """Return a checkpoint's cursor and the mark of its entry; one of an older release knows no mark."""
    return checkpoint.state["cursor"], checkpoint.state.get("mark", "")


def check_identity(checkpoint: Checkpoint, identity: Mapping[str, str]) -> None:
    """Raise CheckpointMismatch, with the difference, for a checkpoint that another model or plan has made."""
    if changed := changes(checkpoint.state["identity"], identity):
        told = ", ".join(f"{key}: {before} → {now}" for key, (before, now) in changed.items())
        raise CheckpointMismatch(
            f"{checkpoint.path} was made with another model, tokenizer, template, lora.rank or evaluation "
            f"({told}); give the run another run.name, or restore what was changed"
        )


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return what differs between two nested mappings, as `section.key: (before, now)`."""
    found: dict[str, tuple[Any, Any]] = {}
    for key in sorted(before.keys() | now.keys()):
        old, new = before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found |= {f"{key}.{inner}": pair for inner, pair in changes(old, new).items()}
        elif old != new:
            found[key] = (old, new)
    return found
