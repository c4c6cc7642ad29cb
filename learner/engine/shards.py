"""Named tensors in a few safetensors files, which make up the learner's checkpoint. Knows nothing of training."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from horizonrl.common.errors import CheckpointError

SHARD_BYTES = 1 << 30
"""A file that holds this much is closed, so saving needs memory for this much and one tensor on top of the state."""


def write_shards(tensors: Iterable[tuple[str, Tensor]], directory: Path) -> list[str]:
    """Write tensors as safetensors files of about `SHARD_BYTES`, taking them one by one; return the files' names."""
    files: list[str] = []
    for shard in _shards(tensors):
        files.append(f"training-{len(files):05d}.safetensors")
        save_file(shard, directory / files[-1])
    return files


def _shards(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    for name, tensor in tensors:
        shard[name] = tensor.cpu()
        if sum(held.nbytes for held in shard.values()) >= SHARD_BYTES:
            yield shard
            # The writer has saved this shard when it asks for the next one: its memory is free before more is gathered.
            shard.clear()
    if shard:
        yield shard


@dataclass(frozen=True, slots=True)
class Shards:
    """Open files, read tensor by tensor."""

    holders: dict[str, Any]
    """The open file that holds each tensor, by the tensor's name."""

    @property
    def shapes(self) -> dict[str, list[int]]:
        return {name: holder.get_slice(name).get_shape() for name, holder in self.holders.items()}

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self.holders[name].get_tensor(name)
        return tensor


@contextmanager
def open_shards(directory: Path, files: Iterable[str]) -> Iterator[Shards]:
    """Open the files that `write_shards` wrote; raise CheckpointError if one is missing or cut short."""
    with ExitStack() as stack:
        try:
            opened = [stack.enter_context(safe_open(directory / file, framework="pt")) for file in files]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{directory} is damaged ({error}): resume from an earlier checkpoint") from error
        yield Shards({name: holder for holder in opened for name in holder.offset_keys()})
