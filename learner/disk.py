"""The disk of a learner: how much a run will need, and whether it is there before the first step is taken.

`horizonrl plan` prints the same need, and a test holds the volumes of the Kubernetes overlays against it.
"""

import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from horizonrl.common.config.schema import RunConfig
from horizonrl.common.errors import CheckpointError
from horizonrl.common.logs import get_logger
from horizonrl.common.model_dir import tensor_shapes, weight_files
from horizonrl.common.run_dir import BEST, CHECKPOINTS, WEIGHTS

log = get_logger()

FILES_KEPT = 3
"""Weights files: the newest and the two before it. An actor may still read one, and engines are compared on them."""
OPTIMIZER_BYTES = 12.0
"""Per trained parameter: its float32 master and AdamW's two moments."""
WEIGHT_BYTES = 2.0
"""Per parameter of a weights file (bfloat16)."""


@dataclass(frozen=True, slots=True)
class DiskNeed:
    """Bytes of the run directory at their most. Without the streams of a broker that `train` keeps there."""

    checkpoint: float
    """One checkpoint, without its weights."""
    frame: float
    """One weights file."""
    checkpoints: float
    """Those that are kept, and the one that is being written."""
    frames: float
    """The newest weights files, and older ones to which checkpoints and the best version are hard links."""
    episodes: float
    """The bound of `episodes/`."""

    @property
    def first(self) -> float:
        """What is written up to the end of the first checkpoint."""
        return self.checkpoint + FILES_KEPT * self.frame

    @property
    def training(self) -> float:
        """What is written for certain: all but the episodes."""
        return self.checkpoints + self.frames

    @property
    def total(self) -> float:
        return self.training + self.episodes


def disk_need(config: RunConfig, parameters: float, trained: float) -> DiskNeed:
    """Return what a run of a model of `parameters` needs, of which `trained` are in training (fewer with LoRA)."""
    frame = WEIGHT_BYTES * parameters
    # A reference is a whole model, and part of each checkpoint.
    checkpoint = OPTIMIZER_BYTES * trained + (frame if config.objective.needs_reference else 0.0)
    keep = config.learner.keep_checkpoints
    # The best version, and one whose evaluation is under way.
    evaluated = 2 if config.eval.every else 0
    return DiskNeed(
        checkpoint=checkpoint,
        frame=frame,
        checkpoints=(keep + 1) * checkpoint,
        frames=(FILES_KEPT + keep + evaluated) * frame,
        episodes=float(config.learner.keep_episodes_bytes),
    )


def require_disk(config: RunConfig, model_dir: Path) -> None:
    """Log what the run will need, and warn if the disk has less.

    Raises CheckpointError if a run that has no checkpoint yet could not even write the first one.
    """
    need = disk_need(config, *count_parameters(model_dir, config.lora.rank))
    config.run_dir.mkdir(parents=True, exist_ok=True)
    places = [config.run_dir / name for name in (CHECKPOINTS, WEIGHTS, BEST)]
    free, held = shutil.disk_usage(config.run_dir).free, sum(_sizes(places))
    log.info(
        "disk_planned",
        training_gb=_gb(need.training),
        episodes_gb=_gb(need.episodes),
        free_gb=_gb(free),
    )
    if free + held >= need.training:
        return
    reason = (
        f"the disk of {config.run_dir} has {_gb(free)} GB free, but the run needs {_gb(need.training - held)} GB more: "
        f"for weights, {config.learner.keep_checkpoints} checkpoints and another one while it is written. Episodes "
        f"take up to {_gb(need.episodes)} GB on top. Free some space or enlarge the volume; or lower "
        "learner.keep_checkpoints"
    )
    if held == 0 and free < need.first:
        raise CheckpointError(reason)
    log.warning("disk_short", reason=reason)


def count_parameters(model_dir: Path, lora_rank: int) -> tuple[int, int]:
    """Return the parameters in the safetensors files of a model's directory, and how many of them a run trains.

    With LoRA, those are the adapters of each linear layer.
    """
    shapes = tensor_shapes(*weight_files(model_dir))
    parameters = sum(math.prod(shape) for shape in shapes.values())
    adapters = sum(
        lora_rank * sum(shape) for name, shape in shapes.items() if name.endswith("_proj.weight")
    )
    return parameters, adapters if lora_rank else parameters


def _sizes(places: list[Path]) -> Iterator[int]:
    """Yield the size of each file, and of its hard links only once."""
    seen = set()
    for path in places:
        for folder, _, names in os.walk(path):
            for name in names:
                stat = (Path(folder) / name).lstat()
                if stat.st_ino not in seen:
                    seen.add(stat.st_ino)
                    yield stat.st_size


def _gb(size: float) -> float:
    return round(size / 1e9, 1)
