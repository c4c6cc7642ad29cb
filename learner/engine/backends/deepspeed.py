"""The learner's backend on DeepSpeed ZeRO: one process, or several with the optimizer's state spread over them.

The only file that imports deepspeed. Its process has the environment of `spawn.py`, or is alone. `step.py` decides
what is computed.
"""

import atexit
import io
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from horizonrl.common.errors import MissingDependency
from horizonrl.common.imports import uncollected
from horizonrl.learner.engine.adamw import PausingAdamW
from horizonrl.learner.engine.api import EngineSettings
from horizonrl.learner.engine.checkpoint.partitions import MASTER, Partitions
from horizonrl.learner.engine.model.model import ScorerOutput, TokenScorer
from horizonrl.learner.engine.step import PolicyGradientEngine, build_scorer, prepare_process


def start_engine(settings: EngineSettings) -> PolicyGradientEngine:
    return PolicyGradientEngine(settings, DeepSpeedBackend(settings))


class DeepSpeedBackend:
    """`backends.api.Backend` on DeepSpeed's engine."""

    def __init__(self, settings: EngineSettings) -> None:
        self._stage = settings.zero_stage
        self.device = prepare_process(settings)
        self._deepspeed = _start_deepspeed(settings)
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.scorer = build_scorer(settings, self.device)
        groups = [{"params": list(group.values())} for group in self.scorer.trained()]
        self._adamw = PausingAdamW(groups, **settings.adamw)
        self._config = _deepspeed_config(settings)
        self._held: list[Any] = []
        """The engines of models that are not trained."""
        if self._stage == 3:
            self._partition(self.scorer)
        self._engine = self._initialize(self.scorer, self._adamw)
        self._partitions = Partitions(self._engine, self._stage, self.device)

    def forward(self, *asked: Tensor) -> ScorerOutput:
        # Whatever kind of tuple DeepSpeed's hooks return.
        return ScorerOutput(*self._engine(*asked))

    def backward(self, loss: Tensor) -> None:
        # DeepSpeed averages over ranks, the objective is a sum.
        self._engine.backward(loss * self.ranks)

    def drop_gradients(self) -> bool:
        if self._stage > 1:  # half a backward pass leaves parts of gradients in DeepSpeed's buckets
            return False
        self._engine.optimizer.zero_grad()
        return True

    def step(self, rates: Sequence[float]) -> float:
        for group, rate in zip(self._adamw.param_groups, rates, strict=True):
            group["lr"] = rate
        self._engine.step()
        return float(self._engine.get_global_grad_norm())

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        gathered = [torch.empty_like(tensor) for _ in range(self.ranks)]
        dist.all_gather(gathered, tensor)
        return gathered

    def add(self, tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor)
        return tensor

    def hold(self, scorer: TokenScorer) -> Callable[..., ScorerOutput]:
        if self._stage < 3:
            return scorer.to(self.device)
        self._partition(scorer)
        engine = self._initialize(scorer)
        self._held.append(engine)
        return lambda *asked: ScorerOutput(*engine(*asked))

    def gather(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Return whole parameters: themselves, or copies at stage 3, where they are partitioned again right away."""
        with self._whole(parameters):
            return (
                [parameter.clone() for parameter in parameters]
                if self._stage == 3
                else list(parameters)
            )

    def write(self, parameter: Tensor, tensor: Tensor) -> None:
        with self._whole([parameter], writer=0):
            parameter.data.copy_(tensor)

    def broadcast(self, tensor: Tensor) -> Tensor:
        if self.ranks == 1:
            return tensor
        # Through this rank's device, since NCCL moves nothing else, and as bytes, since gloo does not know every type.
        moved = tensor.to(self.device).contiguous()
        dist.broadcast(moved.view(-1).view(torch.uint8), src=0)
        return moved

    @property
    def shapes(self) -> dict[str, list[int]]:
        return self._partitions.shapes

    @property
    def steps(self) -> list[int]:
        return self._partitions.steps

    def state(self) -> Iterator[tuple[str, Tensor]]:
        return self._partitions.gathered()

    def load(self, read: Callable[[str], Tensor], steps: Sequence[int]) -> None:
        self._partitions.restore(read, steps)
        for name, parameter in self._partitions.parameters.items():
            # The checkpoint has no parameters: they are the masters, rounded to bfloat16 as they are copied.
            self.write(parameter, read(f"{MASTER}.{name}"))

    def close(self) -> None:
        """Free the engine; the process stays joined to the other ranks, since DeepSpeed cannot join twice."""
        for engine in (*self._held, self._engine):
            engine.destroy()

    def _initialize(
        self, scorer: TokenScorer, optimizer: torch.optim.Optimizer | None = None
    ) -> Any:
        with redirect_stdout(io.StringIO()):  # DeepSpeed prints its memory use, at any log level
            return self._deepspeed.initialize(
                model=scorer, optimizer=optimizer, config=self._config
            )[0]

    def _partition(self, scorer: TokenScorer) -> None:
        """Take this rank's part of each parameter to its device, one after the other.

        `initialize` would move the whole model there first, which has no room where stage 3 is needed. In host memory
        the model costs nothing either: it is mapped from its files (`load_language_model`).
        """
        self._deepspeed.zero.Init(
            module=scorer, dtype=torch.bfloat16, config_dict_or_path=self._config
        )
        for buffer in scorer.buffers():
            buffer.data = buffer.data.to(self.device)

    def _whole(
        self, parameters: Sequence[Any], writer: int | None = None
    ) -> AbstractContextManager[None]:
        """Give a context in which parameters are not partitioned, and what the rank `writer` writes to them stays."""
        if self._stage < 3:
            return nullcontext()
        gathered: AbstractContextManager[None]
        gathered = self._deepspeed.zero.GatheredParameters(parameters, modifier_rank=writer)
        return gathered


def _deepspeed_config(settings: EngineSettings) -> dict[str, Any]:
    config: dict[str, Any] = {
        # DeepSpeed asks for it, and here it means nothing: micro-batches have any size, and `token_loss` scales them.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        # `step` is the boundary, whatever the number of micro-batches.
        "managed_gradient_accumulation": False,
        "gradient_clipping": settings.max_grad_norm,
        "zero_optimization": {"stage": settings.zero_stage},
        "zero_allow_untested_optimizer": True,
        # Stage 1 adds each gradient to its float32 sum as it comes: without it, all of them wait for the end of the
        # pass in bfloat16, 2 bytes per parameter more.
        "bf16": {"enabled": True, "immediate_grad_update": True},
        # In bfloat16 the sum over ranks would be rounded at every addition, and the step would depend on their number.
        "communication_data_type": "fp32",
        "steps_per_print": 1 << 62,
    }
    if settings.zero_stage > 0:
        # Micro-batches would else be added up in bfloat16, and the step would depend on how they were cut.
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    passed = dict(settings.deepspeed)
    config["zero_optimization"] |= passed.pop("zero_optimization", {})
    # With the optimizer on the CPU too, torch's own AdamW steps it: DeepSpeed's would have to be compiled first, and
    # rounds otherwise.
    config["zero_force_ds_cpu_optimizer"] = False
    return config | passed


def _start_deepspeed(settings: EngineSettings) -> Any:
    """Import DeepSpeed quietly and join the other ranks; return the deepspeed module."""
    on_gpu = torch.cuda.is_available()
    # Before the import, which reads them. A single rank has no LOCAL_RANK.
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if on_gpu else "cpu")
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "error")
    os.environ.setdefault("LOCAL_RANK", "0")
    try:
        with uncollected("deepspeed"):
            import deepspeed
    except ImportError as error:
        raise MissingDependency(
            f"learner.backend is deepspeed, which cannot be imported ({error}): pip install deepspeed, or set "
            "learner.backend to torch, which trains in one process without it"
        ) from error

    deepspeed.logger.setLevel("ERROR")
    # DeepSpeed's, every call.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    # An earlier engine of this process may have joined: `close` leaves the group, since DeepSpeed cannot join twice.
    if not dist.is_initialized():
        _join_ranks("nccl" if on_gpu else "gloo", timedelta(seconds=settings.collective_timeout_s))
    # DeepSpeed would compile a shared-memory collective for CPU: a minute, and a C++ compiler, for nothing we need.
    vars(import_module("deepspeed.comm.torch"))["build_shm_op"] = lambda: None
    deepspeed.init_distributed()
    return deepspeed


def _join_ranks(backend: str, timeout: timedelta) -> None:
    """Join the ranks that the environment names (`spawn.py`); without one be alone, with no address and no port."""
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        alone = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, timeout=timeout, store=alone, rank=0, world_size=1)
    atexit.register(dist.destroy_process_group)
