"""DeepSpeed's training state by parameter name, for any number of ranks and any ZeRO stage.

Place in the flow: between DeepSpeed, where every rank steps its own partitions, and a checkpoint, which holds whole
parameters. A parameter has three float32 tensors: its master weights and AdamW's two moments. All ranks make the same
calls in the same order. Reads the maps of DeepSpeed's optimizers without importing it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

MASTER = "master"
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class ParameterSlice:
    """The part of one parameter that this rank steps: `length` elements from `start`, at `offset` in `master`."""

    master: Tensor
    """The tensor that AdamW steps and keeps moments for; at stage 0 the parameter's own."""
    offset: int
    start: int
    length: int


class Partitions:
    """The master weights and moments of an engine. This rank holds its own parts of them; at stage 0, all."""

    def __init__(self, engine: Any, stage: int, device: torch.device) -> None:
        # Names inside DeepSpeed's optimizers, which it does not promise: tests/learner/engine/test_checkpoints.py fails
        # when they change.
        zero: Any = engine.optimizer
        self._adamw: Any = zero.optimizer
        self._device = device
        self._whole_here = stage == 0 or dist.get_world_size() == 1
        self._groups: list[dict[str, Any]] = engine.module.trained()
        self.parameters = {
            name: parameter for named in self._groups for name, parameter in named.items()
        }
        # Not by DeepSpeed's safe_get/set_full_*: they have nothing at stage 0 in bfloat16 and no moments before the
        # first step, and at stage 3 they fail where the ranks do not divide a parameter's size (ADR 9).
        locate = (_at_stage_0, _at_stage_1_or_2, _at_stage_1_or_2, _at_stage_3)[stage]
        self._parts = {
            name: locate(zero, group, position, parameter)
            for group, named in enumerate(self._groups)
            for position, (name, parameter) in enumerate(named.items())
        }
        for master in {part.master for part in self._parts.values()}:
            # What AdamW makes in its first step, so that a checkpoint from before it has the same tensors.
            moments = {kind: torch.zeros_like(master) for kind in MOMENTS}
            self._adamw.state[master] = {"step": torch.zeros((), device=master.device), **moments}

    @property
    def steps(self) -> list[int]:
        """Number of steps that AdamW has taken in each group; its bias correction needs it."""
        firsts = (self._parts[next(iter(named))].master for named in self._groups)
        return [int(self._adamw.state[master]["step"]) for master in firsts]

    @property
    def shapes(self) -> dict[str, list[int]]:
        """The shapes of the whole tensors, by name: the kind, a dot, and the parameter's."""
        return {
            # At stage 3 the parameter is an empty shell between passes, and `ds_shape` is the shape of the whole.
            f"{kind}.{name}": list(getattr(parameter, "ds_shape", parameter.shape))
            for name, parameter in self.parameters.items()
            for kind in (MASTER, *MOMENTS)
        }

    def gathered(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and tensor, whole on rank 0 only. Each is gathered when it is asked for."""
        for whole_name, shape in self.shapes.items():
            kind, name = whole_name.split(".", 1)
            # One at a time, so that rank 0 never needs memory for all three float32 numbers per parameter.
            yield whole_name, self._gather(self._parts[name], kind, shape)

    @torch.no_grad()
    def restore(self, read: Callable[[str], Tensor], steps: Sequence[int]) -> None:
        """Restore the state from `read(name)`; the model's own parameters (the rounded masters) stay unchanged."""
        for whole_name in self.shapes:
            kind, name = whole_name.split(".", 1)
            part = self._parts[name]
            # Each rank cuts its part out of the whole tensor, so a checkpoint does not care how many ranks wrote it.
            self._slice_state(part, kind).copy_(
                read(whole_name).view(-1)[part.start : part.start + part.length]
            )
        for named, taken in zip(self._groups, steps, strict=True):
            for master in {self._parts[name].master for name in named}:
                self._adamw.state[master]["step"].fill_(taken)

    def _gather(self, part: ParameterSlice, kind: str, shape: list[int]) -> Tensor:
        held = self._slice_state(part, kind)
        if self._whole_here:
            return held.view(shape)
        # On the rank's device even where the optimizer is kept on the CPU: NCCL moves nothing else.
        whole = torch.zeros(prod(shape), device=self._device)
        whole[part.start : part.start + part.length] = held
        # As integers: in floats −0.0 plus another rank's 0.0 is 0.0.
        dist.reduce(whole.view(torch.int32), dst=0)
        return whole.view(shape)

    def _slice_state(self, part: ParameterSlice, kind: str) -> Tensor:
        """Return this rank's elements themselves, flat: writing to them is writing to the state."""
        tensor: Tensor = part.master if kind == MASTER else self._adamw.state[part.master][kind]
        return tensor.detach().view(-1)[part.offset : part.offset + part.length]


def _at_stage_0(zero: Any, group: int, position: int, parameter: Any) -> ParameterSlice:
    return ParameterSlice(
        zero.fp32_groups[group][position], offset=0, start=0, length=parameter.numel()
    )


def _at_stage_1_or_2(zero: Any, group: int, _: int, parameter: Any) -> ParameterSlice:
    """Stages 1 and 2 cut the sequence of a group's parameters into one partition per rank, wherever the cut falls."""
    (master,) = zero.optimizer.param_groups[group]["params"]
    # None where this rank's partition holds nothing of the parameter. An empty slice keeps it in step with the others,
    # which gather every parameter.
    mapping = parameter._hp_mapping
    if mapping is None:
        return ParameterSlice(master, offset=0, start=0, length=0)
    in_master, in_parameter = mapping.hp_fragment_address, mapping.lp_fragment_address
    return ParameterSlice(master, in_master.start, in_parameter.start, in_master.numel)


def _at_stage_3(zero: Any, _: int, __: int, parameter: Any) -> ParameterSlice:
    """Stage 3 cuts every parameter into equal parts and fills the last ones up with padding."""
    group, offset, padded = zero.grad_position[zero.get_param_id(parameter)]
    # The last ranks of a small parameter may hold padding alone: their slice is then empty, and starts at its end.
    start = min(dist.get_rank() * padded, parameter.ds_numel)
    return ParameterSlice(
        zero.fp32_partitioned_groups_flat[group],
        offset,
        start,
        min(padded, parameter.ds_numel - start),
    )
