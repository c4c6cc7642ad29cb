"""Host memory for a policy that is about to be written: a GPU copies into the same pages at every version.

Place in the flow: between the model in training and its weights file. A copy into fresh pageable memory takes several
times as long as one into pages that the GPU reaches by itself (docs/performance.md, What a version costs).
"""

import torch
from torch import Tensor

CHUNK_BYTES = 1 << 30
"""Pinned at a time. torch pins powers of two, so a chunk for every tensor could take twice the memory."""
ALIGNMENT = 256


class HostMemory:
    """Room for each tensor that was ever copied, by its name; a name keeps its shape."""

    def __init__(self) -> None:
        self._rooms: dict[str, Tensor] = {}
        self._free = torch.empty(0, dtype=torch.uint8)
        """What is left of the newest chunk."""
        self._copying: set[torch.device] = set()
        """The devices that copies have been asked of since the last `wait`."""

    def copy(self, name: str, tensor: Tensor) -> Tensor:
        """Return a tensor as bfloat16 in host memory; it is there after `wait`, and until the name's next copy.

        One that is there already is returned as it is.
        """
        if _is_there(tensor):
            return tensor
        if name not in self._rooms:
            self._rooms[name] = (
                self._room(2 * tensor.numel()).view(torch.bfloat16).view(tensor.shape)
            )
        self._copying.add(tensor.device)
        return self._rooms[name].copy_(tensor, non_blocking=True)

    def wait(self) -> None:
        """Wait until every copy that was asked for is there."""
        for device in self._copying:
            torch.accelerator.synchronize(device)
        self._copying.clear()

    def _room(self, size_bytes: int) -> Tensor:
        taken = -(-size_bytes // ALIGNMENT) * ALIGNMENT
        if taken > len(self._free):
            chunk = max(CHUNK_BYTES, 1 << (taken - 1).bit_length())
            self._free = _pin(chunk)
        room, self._free = self._free[:size_bytes], self._free[taken:]
        return room


def _is_there(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _pin(size_bytes: int) -> Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
