"""AdamW whose groups pause at a rate of 0, for the policy while its critic warms up, and for a critic in imitation."""

from collections.abc import Callable
from typing import Any

import torch


class PausingAdamW(torch.optim.AdamW):
    """torch's fused AdamW, where a group whose rate is 0 is left as it is: weights, moments and number of steps.

    A step at rate 0 would move no weight, but count. The bias corrections 1 − βᵗ (arXiv 1412.6980, algorithm 1) would
    then be those of a later step, and the first steps after a pause several times as large as the rate says.
    """

    def __init__(self, groups: list[dict[str, Any]], **settings: Any) -> None:
        # Every step sets its own rates. Until the first one nothing moves.
        super().__init__(groups, lr=0.0, fused=True, **settings)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        paused = [
            parameter
            for group in self.param_groups
            if group["lr"] == 0.0
            for parameter in group["params"]
        ]
        gradients = [parameter.grad for parameter in paused]
        for parameter in paused:
            parameter.grad = None
        loss: float | None = super().step(closure)
        # Given back rather than dropped: a backend may hold views of them.
        for parameter, gradient in zip(paused, gradients, strict=True):
            parameter.grad = gradient
        return loss
