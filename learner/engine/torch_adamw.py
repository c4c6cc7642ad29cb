"""The learner's backend in plain torch: one process, a bfloat16 model, AdamW on float32 masters. No deepspeed.

For installs without DeepSpeed, and a pattern for other backends. It does the arithmetic of DeepSpeed's stage 1 on one
rank, operation by operation, so a run may change between the two (`tests/learner/engine/test_backends.py`).
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from horizonrl.learner.engine.api import EngineSettings
from horizonrl.learner.engine.model import ScorerOutput
from horizonrl.learner.engine.partitions import MASTER, MOMENTS
from horizonrl.learner.engine.step import PolicyGradientEngine, build_scorer, prepare_process

NORM_EPSILON = 1e-6
"""DeepSpeed's, added to the norm before it is divided by the largest one allowed."""


def start_engine(settings: EngineSettings) -> PolicyGradientEngine:
    return PolicyGradientEngine(settings, TorchBackend(settings))


class TorchBackend:
    """`step.Backend` in one process."""

    rank = 0
    ranks = 1
    same_pass_on_all_ranks = False

    def __init__(self, settings: EngineSettings) -> None:
        self.device = prepare_process(settings)
        self.scorer = build_scorer(settings).to(self.device)
        self._max_grad_norm = settings.max_grad_norm
        self._groups = self.scorer.trained()
        self._parameters = {name: parameter for group in self._groups for name, parameter in group.items()}
        self._masters = {name: parameter.detach().float() for name, parameter in self._parameters.items()}
        groups = [{"params": [self._masters[name] for name in group]} for group in self._groups]
        self._adamw = torch.optim.AdamW(groups, lr=0.0, weight_decay=settings.weight_decay, fused=True)
        for master in self._masters.values():
            # What AdamW makes in its first step, made here so that a checkpoint from before it has the same tensors.
            moments = {kind: torch.zeros_like(master) for kind in MOMENTS}
            self._adamw.state[master] = {"step": torch.zeros((), device=self.device), **moments}

    def forward(self, *asked: Tensor) -> ScorerOutput:
        output: ScorerOutput = self.scorer(*asked)
        return output

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        for name, parameter in self._parameters.items():
            master = self._masters[name]
            if parameter.grad is not None:  # added up in float32: in bfloat16 the step would depend on the split
                master.grad = parameter.grad.float() if master.grad is None else master.grad.add_(parameter.grad)
                parameter.grad = None

    @torch.no_grad()
    def step(self, rates: Sequence[float]) -> float:
        for master in self._masters.values():
            if master.grad is None:  # AdamW passes over what has no gradient; DeepSpeed lets its moments decay
                master.grad = torch.zeros_like(master)
        norm = torch.linalg.vector_norm(torch.stack([self._norm(group) for group in self._groups]))
        scale = 1.0 / ((norm + NORM_EPSILON) / self._max_grad_norm).clamp(min=1.0)
        for group, rate in zip(self._adamw.param_groups, rates, strict=True):
            group["lr"] = rate
            for master in group["params"]:
                master.grad.mul_(scale)
        self._adamw.step()
        self._adamw.zero_grad()
        self._round_masters()
        return float(norm)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor]

    def gather(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        return list(parameters)

    @property
    def shapes(self) -> dict[str, list[int]]:
        return {name: list(tensor.shape) for name, tensor in self.state()}

    @property
    def steps(self) -> int:
        return int(next(iter(self._adamw.state.values()))["step"])

    def state(self) -> Iterator[tuple[str, Tensor]]:
        for name, master in self._masters.items():
            yield f"{MASTER}.{name}", master
            for kind in MOMENTS:
                yield f"{kind}.{name}", self._adamw.state[master][kind]

    @torch.no_grad()
    def load(self, read: Callable[[str], Tensor], steps: int) -> None:
        for name, tensor in self.state():
            tensor.copy_(read(name))
        for state in self._adamw.state.values():
            state["step"].fill_(steps)
        self._round_masters()

    def close(self) -> None:
        """Free the masters, the moments and the model."""
        self._adamw.state.clear()
        self._masters.clear()
        self._parameters.clear()
        self._groups.clear()
        del self.scorer

    def _norm(self, group: dict[str, torch.nn.Parameter]) -> Tensor:
        """Return the norm of a group's gradients, with the roundings that DeepSpeed makes."""
        norms = [torch.linalg.vector_norm(self._masters[name].grad) for name in group]
        return torch.stack(norms).pow(2.0).sum().pow(0.5)

    def _round_masters(self) -> None:
        for name, parameter in self._parameters.items():
            parameter.data.copy_(self._masters[name])
