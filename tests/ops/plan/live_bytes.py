"""Counts the bytes of tensors that are alive, real ones and fake ones."""

import gc
import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered: the bytes alive now, and the most of each phase. A storage counts once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase = ""
        self.begin(())

    def begin(self, held: Iterable[Tensor]) -> None:
        """Count from here on, and `held`, which was there before."""
        self.now = 0
        self.peaks: dict[str, int] = {}
        self._sizes: dict[int, int] = {}
        for tensor in held:
            self._count(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor):
                self._count(leaf)
        self.peaks[self.phase] = max(self.now, self.peaks.get(self.phase, 0))
        return output

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            self.now += storage.nbytes()
            weakref.finalize(storage, self._drop, self._sizes, key)

    def _drop(self, sizes: dict[int, int], key: int) -> None:
        size = sizes.pop(key)
        if sizes is self._sizes:
            self.now -= size


def live_tensors() -> list[Tensor]:
    """Return the tensors of this process that Python knows, and their gradients."""
    gc.collect()
    found = [thing for thing in gc.get_objects() if isinstance(thing, Tensor)]
    gradients = [tensor.grad for tensor in found if tensor.is_leaf and tensor.grad is not None]
    return [tensor for tensor in (*found, *gradients) if not tensor.is_meta]
