"""What a backend is to the engine: it holds the model and its optimizer, and knows how they are spread over ranks."""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from horizonrl.learner.engine.model.model import ScorerOutput, TokenScorer


class Backend(Protocol):
    """The model in training and its optimizer on this rank. All ranks make the same calls in the same order."""

    rank: int
    ranks: int
    device: torch.device
    scorer: TokenScorer
    """The model; called through `forward` only, and its parameters are whole only in what `gather` returns."""

    def forward(self, *asked: Tensor) -> ScorerOutput:
        """Call the scorer."""

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of this rank's share of the objective, which is the sum over ranks."""

    def drop_gradients(self) -> bool:
        """Forget the gradients since the last step, of half a `backward` too; return False where that cannot be done.

        This rank alone calls it, where it is the only one.
        """

    def step(self, rates: Sequence[float]) -> float:
        """Clip, step with one rate per parameter group, forget the gradient; return its norm before clipping.

        A group whose rate is 0 is left as it is, and counts no step.
        """

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return every rank's tensor, in rank order."""

    def add(self, tensor: Tensor) -> Tensor:
        """Return the sum of every rank's tensor, on every rank; `tensor` itself is given up for it."""

    def hold(self, scorer: TokenScorer) -> Callable[..., ScorerOutput]:
        """Keep a second scorer, which is not trained, as the first is kept; return what calls it."""

    def gather(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Return parameters of the scorer, or of one in `hold`, whole, on every rank."""

    def write(self, parameter: Tensor, tensor: Tensor) -> None:
        """Set a parameter, of which a rank may hold a part, to a whole tensor that all ranks have."""

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Return rank 0's tensor on every rank; on the others `tensor` says shape and type."""

    @property
    def shapes(self) -> dict[str, list[int]]:
        """The shapes of what `state` yields, by name."""

    @property
    def steps(self) -> list[int]:
        """Number of steps that the optimizer has taken in each group; AdamW's bias correction needs it."""

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the masters and the optimizer's state by name, each whole on rank 0 when it is asked for.

        A name is `KIND.PARAMETER`. Backends with the same names and shapes resume each other's checkpoints: those with
        AdamW have the kinds `master`, `exp_avg` and `exp_avg_sq`.
        """

    def load(self, read: Callable[[str], Tensor], steps: Sequence[int]) -> None:
        """Restore the state from `read(name)`, and the model's parameters, which are the rounded masters."""

    def close(self) -> None:
        """Free the memory."""
