"""Named tensors in safetensors files: the learner's checkpoint, and the policy. Knows nothing of training."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from horizonrl.common.errors import CheckpointError, CheckpointMismatch

ENGINE_FILE = "engine.json"
SHARD_BYTES = 1 << 28
"""A file that holds this much is closed. With several ranks, saving needs memory for this much and one tensor."""
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "U8": "uint8"}
"""The types of a checkpoint's tensors, as safetensors and as torch call them."""
_CODES = {getattr(torch, name): code for code, name in _DTYPES.items()}


def write_tensors(
    tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None
) -> None:
    """Write contiguous CPU tensors as one safetensors file, from where they lie in memory.

    The same bytes as those of `safetensors.torch.save_file`, which copies all tensors first.
    """
    # Its order: the widest numbers first, so that each is aligned; then by name.
    ordered = sorted(tensors.items(), key=lambda named: (-named[1].element_size(), named[0]))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in ordered:
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": _CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in ordered:
            file.write(_view_bytes(tensor))


def _view_bytes(tensor: Tensor) -> memoryview:
    content: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(content)


def _digest(tensor: Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(_view_bytes(tensor))


def write_shards(tensors: Iterable[tuple[str, Tensor]], directory: Path) -> list[str]:
    """Write tensors as safetensors files of about `SHARD_BYTES`, taking them one by one; return the files' names.

    The header of each has the digests of its tensors, by which `Shards.read` finds a bit that has flipped since.
    """
    files: list[str] = []
    for shard in _shards(tensors):
        files.append(f"training-{len(files):05d}.safetensors")
        digests = {name: _digest(tensor) for name, tensor in shard.items()}
        write_tensors(shard, directory / files[-1], digests)
    return files


def _shards(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    for name, tensor in tensors:
        shard[name] = tensor.cpu().contiguous()
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
    digests: Mapping[str, str]
    """Of those that have one."""

    @property
    def shapes(self) -> dict[str, list[int]]:
        return {name: holder.get_slice(name).get_shape() for name, holder in self.holders.items()}

    def dtype(self, name: str) -> str:
        """Return the type of a tensor under torch's name for it."""
        return _DTYPES[self.holders[name].get_slice(name).get_dtype()]

    def read(self, name: str) -> Tensor:
        """Return a tensor; raise CheckpointError if it has a digest, and other bits than when it was written."""
        tensor: Tensor = self.holders[name].get_tensor(name)
        written = self.digests.get(name)
        if written is not None and _digest(tensor) != written:
            raise CheckpointError(f"the tensor {name} has other bits than were written")
        return tensor


@dataclass(frozen=True, slots=True)
class SharedShards:
    """Files that rank 0 alone can open, read by all ranks: every rank makes the same calls in the same order."""

    opened: Shards | None
    """The files, on rank 0."""
    facts: dict[str, tuple[list[int], str]]
    """The shape and the type of every tensor, by its name."""
    broadcast: Callable[[Tensor], Tensor]

    @property
    def shapes(self) -> dict[str, list[int]]:
        return {name: shape for name, (shape, _) in self.facts.items()}

    def read(self, name: str) -> Tensor:
        """Return a tensor on every rank; one at a time, so that no rank needs memory for more than it and its part."""
        shape, dtype = self.facts[name]
        read = (
            torch.empty(shape, dtype=getattr(torch, dtype))
            if self.opened is None
            else self.opened.read(name)
        )
        return self.broadcast(read)


@contextmanager
def share_shards(
    directory: Path, files: Iterable[str], rank: int, broadcast: Callable[[Tensor], Tensor]
) -> Iterator[SharedShards]:
    """Open files on rank 0, for all ranks. `broadcast` returns rank 0's tensor on every rank."""
    if rank == 0:
        with open_shards(directory, files) as opened:
            facts = {name: (shape, opened.dtype(name)) for name, shape in opened.shapes.items()}
            yield SharedShards(opened, share_json(facts, broadcast), broadcast)
    else:
        yield SharedShards(None, share_json(None, broadcast), broadcast)


def share_json(content: Any, broadcast: Callable[[Tensor], Tensor]) -> Any:
    """Return rank 0's `content` on every rank."""
    encoded = json.dumps(content).encode()
    # A broadcast fills a tensor that exists, so the others have to learn its size first.
    length = int(broadcast(torch.tensor([len(encoded)])))
    text = torch.frombuffer(bytearray(encoded[:length].ljust(length)), dtype=torch.uint8)
    return json.loads(broadcast(text).cpu().numpy().tobytes())


@contextmanager
def open_shards(directory: Path, files: Iterable[str]) -> Iterator[Shards]:
    """Open the files that `write_shards` wrote; raise CheckpointError if one is missing or cut short."""
    with ExitStack() as stack:
        try:
            opened = [
                stack.enter_context(safe_open(directory / file, framework="pt")) for file in files
            ]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{directory} is damaged ({error}): resume from an earlier checkpoint"
            ) from error
        holders = {name: holder for holder in opened for name in holder.offset_keys()}
        digests = {
            name: digest for file in opened for name, digest in (file.metadata() or {}).items()
        }
        yield Shards(holders, digests)


def read_engine_file(directory: Path) -> dict[str, Any]:
    """Return what an engine wrote beside its tensors; raise CheckpointError if it is not there, or not whole."""
    try:
        written: dict[str, Any] = json.loads((directory / ENGINE_FILE).read_text(encoding="utf-8"))
        return written | {
            "state": dict(written["state"]),
            "optimizer_steps": [int(count) for count in written["optimizer_steps"]],
            "files": list(written["files"]),
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"no engine's checkpoint in {directory}: name a complete one ({error!r})"
        ) from error


def check_same_model(
    saved: Mapping[str, list[int]], shapes: Mapping[str, list[int]], directory: Path
) -> None:
    """Raise CheckpointMismatch, with the first difference, if the shapes of the tensors are not those saved."""
    differing = [
        name for name in sorted(saved.keys() | shapes.keys()) if saved.get(name) != shapes.get(name)
    ]
    if differing:
        name = differing[0]
        if all("critic." in other for other in differing):
            has = "has a critic, and" if name in saved else "has no critic, but"
            raise CheckpointMismatch(
                f"the checkpoint {directory} {has} advantage.kind now asks for {'none' if name in saved else 'one'}: "
                "resume with the advantage.kind that the run began with, or begin a new run from its weights"
            )
        raise CheckpointMismatch(
            f"the checkpoint {directory} is of another model, lora.rank or learner.backend: {len(differing)} tensors "
            f"differ, the first of them {name}, of shape {saved.get(name, 'none')} there and "
            f"{shapes.get(name, 'none')} here; resume with those that the run began with"
        )
