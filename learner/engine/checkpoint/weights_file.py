"""The policy's weights as a safetensors file, adapters merged."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from horizonrl.broker.weights.frames import digest_file
from horizonrl.common.files import atomic_write

if TYPE_CHECKING:
    import torch

WEIGHTS_FILE = "weights.safetensors"
"""The policy in every checkpoint, next to the files that only the learner reads."""
ADAPTERS = ".adapters"
"""Suffix of the adapters' file next to a weights file: safetensors too, and what actors get of it in its place."""


def write_weights_file(tensors: Mapping[str, "torch.Tensor"], path: Path) -> str:
    """Write tensors as bfloat16 safetensors that appear under `path` only once complete; return the file's digest."""
    import torch  # only here: an evaluation exports files before it starts an engine, and torch starts threads

    from horizonrl.learner.engine.checkpoint.shards import write_tensors

    rounded = {name: t.to("cpu", torch.bfloat16).contiguous() for name, t in tensors.items()}
    with atomic_write(path) as incoming:
        write_tensors(rounded, incoming, metadata={"format": "pt"})
        # While the name is still hidden: nobody can read the file before its digest is known.
        return digest_file(incoming)
