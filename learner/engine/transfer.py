"""Arrays on their way to the device that trains. Knows nothing of what they mean."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return the array as a tensor on `device`, without waiting for what a GPU has still to compute."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type != "cuda":
        return tensor.to(device)
    # From pageable memory the copy would wait until the GPU's queue is empty.
    return tensor.pin_memory().to(device, non_blocking=True)
