"""The learner's engine on DeepSpeed: a Batch in, one optimizer step, new weights out.

Place in the flow: Batch → **Version**. The only file that imports deepspeed. Every rank holds one engine and calls the
same methods in the same order; `ranks.py` makes that so. Parameters, activations and logits are bfloat16 as in the
actors' engine; log-probabilities, gradient sums, master weights and AdamW's moments are float32.
"""

import atexit
import io
import json
import math
import os
import time
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from dataclasses import astuple, dataclass, field, replace
from datetime import timedelta
from importlib import import_module
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

from horizonrl.broker.weights import digest_file
from horizonrl.common.config.objective import Objective
from horizonrl.common.errors import CheckpointError, CheckpointMismatch, RunFailed
from horizonrl.common.logs import get_logger
from horizonrl.learner.algorithm.advantage import Scores
from horizonrl.learner.algorithm.objective import (
    LossStats,
    TrainingSample,
    build_updates,
    loss_inputs,
    loss_stats,
    mean,
    token_loss,
)
from horizonrl.learner.engine.api import StepStats
from horizonrl.learner.engine.lora import add_adapters, merged, policy_weights
from horizonrl.learner.engine.model import ScorerOutput, TokenScorer, checkpoint_layers, load_language_model
from horizonrl.learner.engine.packing import MicroBatch, pack
from horizonrl.learner.engine.partitions import MASTER, Partitions
from horizonrl.learner.engine.shards import open_shards, write_shards
from horizonrl.learner.engine.weights_file import write_weights_file
from horizonrl.learner.intake.batch import Batch, Trace

log = get_logger()

ENGINE_FILE = "engine.json"
REFERENCE_FILE = "reference.safetensors"
_RNG = "torch_rng"


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What an engine needs to know; `common/config/schema.py` documents the knobs."""

    model_dir: Path
    lora_rank: int = 0
    """Of the adapters that are trained beside a frozen model; 0 trains the model itself."""
    zero_stage: int = 1
    threads: int = 1
    micro_batch_tokens: int = 2048
    max_grad_norm: float = 1.0
    weight_decay: float = 0.0
    gradient_checkpointing: bool = False
    seed: int = 0
    temperature: float = 1.0
    """The rollout's: recorded logprobs are of the distribution after temperature. Demonstrations are fitted at 1: an
    expert has none, the pretrained model and what is exported are meant at 1, and the size of a cloning step must not
    depend on how rollouts are sampled."""
    collective_timeout_s: float = 1800.0
    """A collective that waits longer for another rank ends in an error."""
    objective: Objective = field(default_factory=Objective)
    longest_episode_tokens: int = 1024
    """Most tokens that an episode can generate; `loss.normalisation = constant` divides by it."""


class DeepSpeedEngine:
    """`learner/api.Engine` on DeepSpeed ZeRO; one per process, under torchrun or alone."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._deepspeed = _start_deepspeed(settings)
        self.rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
        lm: Any = load_language_model(settings.model_dir)
        self._base: dict[str, str] = {}
        if settings.lora_rank:
            add_adapters(lm, settings.lora_rank)
            self._base = {file.name: digest_file(file) for file in sorted(settings.model_dir.glob("*.safetensors"))}
        lm.eval()  # no dropout: the policy in training is the one that actors sample with
        if settings.gradient_checkpointing:
            checkpoint_layers(lm)
        self.vocabulary: int = lm.get_input_embeddings().num_embeddings
        self._earlier: TokenScorer | None = None
        self._reference: TokenScorer | None = None
        self._reference_version = 0
        scorer = TokenScorer(lm, critic=settings.objective.advantage.needs_critic)
        self._shares_prompts = self._may_share(scorer)
        groups: list[dict[str, Any]] = [{"params": [p for p in lm.parameters() if p.requires_grad]}]
        if scorer.critic is not None:
            groups.append({"params": list(scorer.critic.parameters())})
        # Every step sets its own rate; at stage 0 DeepSpeed takes a first step by itself, which must move nothing.
        self._adamw = torch.optim.AdamW(groups, lr=0.0, weight_decay=settings.weight_decay, fused=True)
        config = _deepspeed_config(settings)
        with redirect_stdout(io.StringIO()):  # DeepSpeed prints its memory use, at any log level
            self._engine: Any = self._deepspeed.initialize(model=scorer, optimizer=self._adamw, config=config)[0]
        self._partitions = Partitions(self._engine, settings.zero_stage)

    def train_step(self, batch: Batch, lr: float) -> StepStats:
        """Make the next version from the batch; raise RunFailed when a gradient is not finite."""
        started = time.perf_counter()
        if batch.trained_tokens == 0:
            raise ValueError("a batch without trained tokens makes no step: settle its groups without training")
        objective = self._settings.objective
        scored = objective.needs_scores and not all(trace.demo for trace in batch.traces)
        scores = self._scored(batch) if scored else None
        updates = build_updates(batch, scores, objective, self._settings.longest_episode_tokens)
        all_stats, norms, rates = zip(*[self._update(update, batch.version, lr) for update in updates], strict=True)
        stats = replace(sum(all_stats, LossStats()), loss=mean(sum(stats.loss for stats in all_stats), len(updates)))
        lr = mean(sum(rates), len(rates))
        return _stats(stats, max(norms), lr, time.perf_counter() - started, objective.needs_reference)

    @torch.no_grad()
    def logprob_gap_at(self, trace: Trace, version: int, weights: Path) -> float:
        """Score one trace with an earlier version's weights, in a second model that is made when first asked for."""
        if self._earlier is None:
            self._earlier = self._frozen_model()
        self._earlier.lm.load_state_dict(load_file(weights), strict=False)  # a tied head has no tensor of its own
        (micro_batch,) = pack([trace], 1, len(trace.ids_L), share=False)[0]
        gaps_N = (
            self._earlier(*self._asked(micro_batch)).logprobs_N - self._tensor(trace.logprobs_L[trace.mask_L])
        ).abs()
        return float(gaps_N[self._tensor(trace.versions_L[trace.mask_L] == version)].mean())

    def write_weights(self, path: Path) -> str:
        """Write the policy's weights as safetensors; return their digest, which only rank 0 knows."""
        tensors = self._gathered()
        return write_weights_file(tensors, path) if self.rank == 0 else ""

    def save(self, directory: Path, state: dict[str, Any]) -> None:
        """Write the training state, whole and by parameter name, and `engine.json` into `directory`."""
        directory.mkdir(parents=True, exist_ok=True)
        tensors = chain([(_RNG, torch.get_rng_state())], self._partitions.gathered())
        if self.rank == 0:
            files = write_shards(tensors, directory)
            written = {"state": state, "optimizer_steps": self._partitions.steps, "files": files, "base": self._base}
            if self._reference is not None:
                written["reference_version"] = self._reference_version
                write_weights_file(dict(self._reference.lm.named_parameters()), directory / REFERENCE_FILE)
            (directory / ENGINE_FILE).write_text(json.dumps(written, indent=2, sort_keys=True), encoding="utf-8")
        else:
            deque(tensors, maxlen=0)  # take part in the gathering, keep nothing
        dist.barrier()

    def load(self, directory: Path) -> dict[str, Any]:
        """Restore what `save` wrote, on any number of ranks and at any stage, and return its `state`.

        All ranks read `directory`. Raises CheckpointError when it is incomplete or of another model.
        """
        try:
            written = json.loads((directory / ENGINE_FILE).read_text(encoding="utf-8"))
            state, steps, files = dict(written["state"]), int(written["optimizer_steps"]), list(written["files"])
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"no engine's checkpoint in {directory}: name a complete one ({error!r})") from error
        rng = {_RNG: list(torch.get_rng_state().shape)}
        with open_shards(directory, files) as shards:
            _check_same_model(shards.shapes, rng | self._partitions.shapes, directory)
            if (base := written.get("base", {})) != self._base:
                raise CheckpointMismatch(
                    f"the adapters in {directory} stand beside other weights ({base}) than those of "
                    f"{self._settings.model_dir} ({self._base}): resume with the model that the run began with"
                )
            self._partitions.restore(shards.read, steps)
            for name, parameter in self._partitions.parameters.items():
                with self._whole([parameter], writer=0):
                    parameter.data.copy_(shards.read(f"{MASTER}.{name}"))
            torch.set_rng_state(shards.read(_RNG))
        self._reference = None
        if (directory / REFERENCE_FILE).is_file() and self._settings.objective.needs_reference:
            self._reference, self._reference_version = self._frozen_model(), int(written["reference_version"])
            self._reference.lm.load_state_dict(load_file(directory / REFERENCE_FILE), strict=False)
        return state

    def close(self) -> None:
        """Free the engine; the process stays joined to the other ranks, since DeepSpeed cannot join twice."""
        self._engine.destroy()

    def _may_share(self, scorer: TokenScorer) -> bool:
        """Return whether a group's prompt is read once for all its episodes; say so when only the model forbids it.

        It goes through the model's cache, which layers that are computed twice would fill twice, and it changes how
        often and in which order parameters are used, which stages 2 and 3 need to be equal on all ranks.
        """
        allowed = self._settings.zero_stage < 2 and not self._settings.gradient_checkpointing
        if allowed and not scorer.shares_prompts and self.rank == 0:
            log.warning(
                "prompts_not_shared",
                model=type(scorer.lm).__name__,
                why="its layers keep more than keys and values, so that each episode's prompt is read anew",
            )
        return allowed and scorer.shares_prompts

    def _update(self, update: list[TrainingSample], version: int, lr: float) -> tuple[LossStats, float, float]:
        """Take one optimizer step; return what was measured before it, the gradient's norm and the rate."""
        objective, mine = self._settings.objective, LossStats()
        for micro_batch in self._packed([sample.trace for sample in update]):
            output = self._output(micro_batch)
            inputs = loss_inputs(update, micro_batch, version, self._device)
            loss_N = token_loss(output, inputs, objective)
            # DeepSpeed averages over ranks, the objective is a sum. The critic always takes part: ZeRO waits for it.
            self._engine.backward((loss_N + 0.0 * output.values_N).sum() * self._ranks)
            mine += loss_stats(loss_N, output, inputs, objective)
        stats = self._total(mine)
        if objective.correction.ess_lr and stats.episodes:
            lr *= math.sqrt(stats.ess_of_episodes)
        for group, rate in zip(self._adamw.param_groups, (lr, objective.critic.lr), strict=False):
            group["lr"] = rate
        self._engine.step()
        grad_norm = float(self._engine.get_global_grad_norm())
        if not math.isfinite(grad_norm):
            raise RunFailed(
                f"the gradient's norm is {grad_norm} in the step after version {version}: resume from the last "
                "checkpoint with a lower learning rate"
            )
        return stats, grad_norm, lr

    @torch.no_grad()
    def _scored(self, batch: Batch) -> list[Scores]:
        """Return what policy, reference and critic say of the whole batch before the step, on every rank."""
        self._move_reference(batch.version)
        tokens = [trace.trained_tokens for trace in batch.traces]
        starts = np.cumsum([0, *tokens])
        table = torch.zeros(3, int(starts[-1]), dtype=torch.float64, device=self._device)
        for micro_batch in self._packed(batch.traces):
            output = self._output(micro_batch)
            reference_N = torch.zeros_like(output.logprobs_N)
            if self._reference is not None:
                reference_N = self._reference(*self._asked(micro_batch)).logprobs_N
            rows = torch.stack([output.logprobs_N, reference_N, output.values_N]).double()
            ends = np.cumsum([0, *(tokens[place] for place in micro_batch.indices_B)])
            for place, start, end in zip(micro_batch.indices_B, ends, ends[1:], strict=False):
                table[:, starts[place] : starts[place + 1]] = rows[:, start:end]
        dist.all_reduce(table)  # the traces of other ranks are 0 here
        whole = table.cpu().numpy()
        return [Scores(*whole[:, start:end]) for start, end in pairwise(starts)]

    def _move_reference(self, version: int) -> None:
        """Let the reference be the present policy when RL begins, and every `refresh_every` versions."""
        objective = self._settings.objective
        if not objective.needs_reference:
            return
        every = objective.reference.refresh_every
        if self._reference is None:
            self._reference = self._frozen_model()
        elif every is None or version < self._reference_version + every:
            return
        self._reference_version = version
        own = dict(self._reference.lm.named_parameters())
        for name, tensor in self._weights():
            own[name].data.copy_(tensor)

    def _frozen_model(self) -> TokenScorer:
        lm = load_language_model(self._settings.model_dir).to(self._device)
        return TokenScorer(lm.requires_grad_(False))

    def _packed(self, traces: Sequence[Trace]) -> list[MicroBatch]:
        """Return this rank's micro-batches."""
        return pack(traces, self._ranks, self._settings.micro_batch_tokens, share=self._shares_prompts)[self.rank]

    def _asked(self, micro_batch: MicroBatch) -> list[Tensor]:
        temperatures_N = np.where(micro_batch.demo_N, 1.0, self._settings.temperature)
        asked = (micro_batch.prefix_P, micro_batch.ids_BT, micro_batch.trained_N, temperatures_N)
        return list(map(self._tensor, asked))

    def _output(self, micro_batch: MicroBatch) -> ScorerOutput:
        return ScorerOutput(*self._engine(*self._asked(micro_batch)))

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)

    def _total(self, stats: LossStats) -> LossStats:
        """Add up the all_stats of all ranks, in rank order."""
        mine = torch.tensor(astuple(stats), dtype=torch.float64, device=self._device)
        rows = [torch.empty_like(mine) for _ in range(self._ranks)]
        dist.all_gather(rows, mine)
        return sum((LossStats(*row.tolist()) for row in rows), LossStats())

    def _gathered(self) -> dict[str, Tensor]:
        """Return the policy's weights under their Hugging Face names, on rank 0 only."""
        tensors: dict[str, Tensor] = {}
        for name, tensor in self._weights():
            if self.rank == 0:
                tensors[name] = tensor.detach().to("cpu", copy=self._settings.zero_stage == 3)
        return tensors

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the policy's weights under their Hugging Face names, each whole until the next is asked for."""
        for name, parts in policy_weights(self._engine.module.lm):
            with self._whole(parts):
                yield name, merged(*parts)

    def _whole(self, parameters: Sequence[Any], writer: int | None = None) -> AbstractContextManager[None]:
        """Give a context in which parameters are not partitioned, and what the rank `writer` writes to them stays."""
        if self._settings.zero_stage < 3:
            return nullcontext()
        gathered: AbstractContextManager[None]
        gathered = self._deepspeed.zero.GatheredParameters(parameters, modifier_rank=writer)
        return gathered


def _check_same_model(saved: Mapping[str, list[int]], mine: Mapping[str, list[int]], directory: Path) -> None:
    differing = [name for name in sorted(saved.keys() | mine.keys()) if saved.get(name) != mine.get(name)]
    if differing:
        name = differing[0]
        raise CheckpointMismatch(
            f"the checkpoint {directory} is of another model or lora.rank: {len(differing)} tensors differ, "
            f"the first of them is {name}, of shape {saved.get(name, 'none')} there and {mine.get(name, 'none')} here; "
            "resume with the model and the rank that the run began with"
        )


def _stats(stats: LossStats, grad_norm: float, lr: float, compute_s: float, has_reference: bool) -> StepStats:
    return StepStats(
        loss=stats.loss,
        grad_norm=grad_norm,
        lr=lr,
        entropy=mean(stats.entropy, stats.tokens),
        kl=mean(stats.kl, stats.compared),
        logprob_gap=mean(stats.gap, stats.compared),
        logprob_gap_fresh=mean(stats.gap_fresh, stats.fresh),
        clip_share=mean(stats.clipped, stats.compared),
        importance_mean=mean(stats.importance, stats.compared),
        importance_max=mean(stats.importance_max, 1 if stats.compared else 0),
        ess=stats.ess,
        reference_kl=mean(stats.reference_kl, stats.compared) if has_reference else math.nan,
        value_error=math.sqrt(mean(stats.value_squared, stats.valued)),
        trained_tokens=int(stats.tokens),
        compute_s=compute_s,
    )


def _deepspeed_config(settings: EngineSettings) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        # `step` is the boundary, whatever the number of micro-batches.
        "managed_gradient_accumulation": False,
        "gradient_clipping": settings.max_grad_norm,
        "zero_optimization": {"stage": settings.zero_stage},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True},
        "communication_data_type": "fp32",
        "steps_per_print": 1 << 62,
    }
    if settings.zero_stage > 0:
        # Micro-batches would else be added up in bfloat16, and the step would depend on how they were cut.
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


def _start_deepspeed(settings: EngineSettings) -> Any:
    """Set the process up, import DeepSpeed quietly, join the other ranks; return the deepspeed module."""
    on_gpu = torch.cuda.is_available()
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if on_gpu else "cpu")
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "error")
    os.environ.setdefault("LOCAL_RANK", "0")
    # oneDNN keeps a compiled kernel for each of the last 1024 shapes, and each batch brings new ones: 0.4 GB in vain.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")
    torch.manual_seed(settings.seed)
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(settings.threads)
    import deepspeed

    deepspeed.logger.setLevel("ERROR")
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # DeepSpeed's, every call
    if not dist.is_initialized():
        _join_ranks("nccl" if on_gpu else "gloo", timedelta(seconds=settings.collective_timeout_s))
    # DeepSpeed would compile a shared-memory collective for CPU: a minute, and a C++ compiler, for nothing we need.
    vars(import_module("deepspeed.comm.torch"))["build_shm_op"] = lambda: None
    deepspeed.init_distributed()
    return deepspeed


def _join_ranks(backend: str, timeout: timedelta) -> None:
    """Join the ranks that torchrun's environment names; without one be alone, with no address and no port."""
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        alone = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, timeout=timeout, store=alone, rank=0, world_size=1)
    atexit.register(dist.destroy_process_group)
