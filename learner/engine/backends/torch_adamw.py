"""The learner's backend in plain torch: one process, a bfloat16 model, AdamW on float32 masters. No deepspeed.

For installs without DeepSpeed, and a pattern for other backends. It follows the arithmetic of DeepSpeed's stage 1 on
one rank: `tests/learner/engine/test_backends.py` says where the two are equal bit for bit, and where only close.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from horizonrl.learner.engine.adamw import PausingAdamW
from horizonrl.learner.engine.api import EngineSettings
from horizonrl.learner.engine.checkpoint.partitions import MASTER, MOMENTS
from horizonrl.learner.engine.model.model import ScorerOutput, TokenScorer
from horizonrl.learner.engine.step import PolicyGradientEngine, build_scorer, prepare_process

NORM_EPSILON = 1e-6
"""DeepSpeed's, added to the norm before it is divided by the largest one allowed."""


def start_engine(settings: EngineSettings) -> PolicyGradientEngine:
    return PolicyGradientEngine(settings, TorchBackend(settings))


class TorchBackend:
    """`backends.api.Backend` in one process."""

    rank = 0
    ranks = 1

    def __init__(self, settings: EngineSettings) -> None:
        self.device = prepare_process(settings)
        self.scorer = build_scorer(settings, self.device).to(self.device)
        self._max_grad_norm = settings.max_grad_norm
        self._groups = self.scorer.trained()
        self._parameters = {
            name: parameter for group in self._groups for name, parameter in group.items()
        }
        # One flat master per group, as DeepSpeed has, so that AdamW is one kernel call per group.
        self._flat = [
            torch.cat([p.detach().float().flatten() for p in group.values()])
            for group in self._groups
        ]
        groups = [{"params": [flat]} for flat in self._flat]
        self._adamw = PausingAdamW(groups, **settings.adamw)
        gradients = [torch.zeros_like(flat) for flat in self._flat]
        for flat, gradient in zip(self._flat, gradients, strict=True):
            flat.grad = gradient
            # What AdamW makes in its first step, made here so that a checkpoint from before it has the same tensors.
            moments = {kind: torch.zeros_like(flat) for kind in MOMENTS}
            self._adamw.state[flat] = {"step": torch.zeros((), device=self.device), **moments}
        self._gradients = self._by_name(gradients)
        for name, parameter in self._parameters.items():
            take = partial(_take_gradient, self._gradients[name])
            parameter.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]
        self._state = {MASTER: self._by_name(self._flat)}
        self._state |= {
            kind: self._by_name([self._adamw.state[flat][kind] for flat in self._flat])
            for kind in MOMENTS
        }

    def forward(self, *asked: Tensor) -> ScorerOutput:
        output: ScorerOutput = self.scorer(*asked)
        return output

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def drop_gradients(self) -> bool:
        for name, parameter in self._parameters.items():
            self._gradients[name].zero_()
            parameter.grad = None
        return True

    @torch.no_grad()
    def step(self, rates: Sequence[float]) -> float:
        norm = torch.linalg.vector_norm(torch.stack([self._norm(group) for group in self._groups]))
        scale = 1.0 / ((norm + NORM_EPSILON) / self._max_grad_norm).clamp(min=1.0)
        for group, rate in zip(self._adamw.param_groups, rates, strict=True):
            group["lr"] = rate
            group["params"][0].grad.mul_(scale)
        self._adamw.step()
        # Zeroed in place: `_gradients` are views of these tensors, and None would part them from the optimizer.
        self._adamw.zero_grad(set_to_none=False)
        # The small steps add up in the float32 masters; in bfloat16 alone most of them would be rounded away.
        self._round_masters()
        return float(norm)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor]

    def add(self, tensor: Tensor) -> Tensor:
        return tensor

    def hold(self, scorer: TokenScorer) -> Callable[..., ScorerOutput]:
        return scorer.to(self.device)

    def gather(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        return list(parameters)

    def write(self, parameter: Tensor, tensor: Tensor) -> None:
        parameter.data.copy_(tensor)

    def broadcast(self, tensor: Tensor) -> Tensor:
        return tensor

    @property
    def shapes(self) -> dict[str, list[int]]:
        return {name: list(tensor.shape) for name, tensor in self.state()}

    @property
    def steps(self) -> list[int]:
        return [int(self._adamw.state[flat]["step"]) for flat in self._flat]

    def state(self) -> Iterator[tuple[str, Tensor]]:
        for name in self._parameters:
            for kind, tensors in self._state.items():
                yield f"{kind}.{name}", tensors[name]

    @torch.no_grad()
    def load(self, read: Callable[[str], Tensor], steps: Sequence[int]) -> None:
        for name, tensor in self.state():
            tensor.copy_(read(name))
        for flat, taken in zip(self._flat, steps, strict=True):
            self._adamw.state[flat]["step"].fill_(taken)
        self._round_masters()

    def close(self) -> None:
        """Free the model, the masters and the moments."""
        self.__dict__.clear()

    def _by_name(self, flats: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the views of flat tensors, one per group, that belong to each parameter."""
        views: dict[str, Tensor] = {}
        for group, flat in zip(self._groups, flats, strict=True):
            pieces = torch.split(flat, [parameter.numel() for parameter in group.values()])
            views |= {
                name: piece.view_as(group[name]) for name, piece in zip(group, pieces, strict=True)
            }
        return views

    def _norm(self, group: Iterable[str]) -> Tensor:
        """Return the norm of a group's gradients, in the order of operations of DeepSpeed."""
        norms = [torch.linalg.vector_norm(self._gradients[name]) for name in group]
        return torch.stack(norms).pow(2.0).sum().pow(0.5)

    def _round_masters(self) -> None:
        for name, parameter in self._parameters.items():
            parameter.data.copy_(self._state[MASTER][name])


def _take_gradient(sums: Tensor, parameter: Tensor) -> None:
    """Add a parameter's gradient to its sums as soon as it is there, and free it."""
    if parameter.grad is not None:
        # Added up in float32: in bfloat16 the step would depend on how the batch was split.
        sums.add_(parameter.grad)
        parameter.grad = None
