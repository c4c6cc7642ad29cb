"""The policy-gradient step on any backend: scores, reference, micro-batches, updates and their statistics.

Place in the flow: Batch → **Version**. `PolicyGradientEngine` decides what is computed; a `Backend` holds the model and
the optimizer and knows how they are spread over ranks. Every rank holds one engine and makes the same calls in the same
order; `ranks.py` sees to that. Parameters, activations and logits are bfloat16, as in the actors' engine;
log-probabilities, gradient sums, master weights and AdamW's moments are float32.
"""

import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import cached_property
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from horizonrl.broker.weights.frames import digest_file
from horizonrl.common.config.objective import CriticAdvantage
from horizonrl.common.errors import CheckpointMismatch, ConfigError, OutOfMemory, RunFailed
from horizonrl.common.gpus import has_gpu
from horizonrl.common.logs import get_logger
from horizonrl.common.model_dir import weight_files
from horizonrl.learner.algorithm.advantage import Scores
from horizonrl.learner.algorithm.batch import Batch, Trace
from horizonrl.learner.algorithm.own import number_names
from horizonrl.learner.engine.api import EngineSettings, StepStats
from horizonrl.learner.engine.backends.api import Backend
from horizonrl.learner.engine.checkpoint.shards import (
    ENGINE_FILE,
    check_same_model,
    read_engine_file,
    share_json,
    share_shards,
    write_shards,
)
from horizonrl.learner.engine.host_memory import HostMemory
from horizonrl.learner.engine.model.float32_matmul import multiplies_bfloat16, widen_products
from horizonrl.learner.engine.model.frozen import (
    FrozenModel,
    frozen_scorer,
    logprob_gaps,
    scorer_at,
)
from horizonrl.learner.engine.model.lora import add_adapters, copy_policy, merged, policy_weights
from horizonrl.learner.engine.model.model import (
    ScorerOutput,
    TokenScorer,
    load_language_model,
    scorer_inputs,
)
from horizonrl.learner.engine.model.packing import MicroBatch, pack
from horizonrl.learner.engine.objective import (
    LossStats,
    TrainingSample,
    build_updates,
    loss_inputs,
    loss_stats,
    mean,
    scored_together,
    step_stats,
    token_loss,
    two_tokens,
)
from horizonrl.learner.engine.recompute import checkpoint_layers, give_back_freed, keep_products
from horizonrl.learner.engine.transfer import to_device

log = get_logger()

REFERENCE_FILE = "reference.safetensors"
_RNG = "torch_rng"
T = TypeVar("T")


class PolicyGradientEngine:
    """`api.RankEngine` on a backend; one per process."""

    def __init__(self, settings: EngineSettings, backend: Backend) -> None:
        self._settings = settings
        self._backend = backend
        self.rank, self.ranks = backend.rank, backend.ranks
        self._number_names = number_names(settings.objective, two_tokens)
        lm: Any = backend.scorer.lm
        self.vocabulary: int = lm.get_input_embeddings().num_embeddings
        self._base: dict[str, str] = {}
        """Digests of the frozen model's files. Adapters mean nothing on top of another model."""
        if settings.lora_rank:
            self._base = {file.name: digest_file(file) for file in weight_files(settings.model_dir)}
        self._reference_version: int | None = None
        """The version whose weights `_reference` has; None when it has none that count."""
        self._host = HostMemory()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="writer")
        self._saving: Future[None] = Future()
        """The checkpoint that is being written; done when there is none."""
        self._saving.set_result(None)
        self._writing: Future[str] = Future()
        """The weights file that is being written; done when there is none."""
        self._writing.set_result("")
        self.stalled_s = 0.0
        if not backend.scorer.packs and self.rank == 0:
            log.warning(
                "prompts_not_shared",
                model=type(lm).__name__,
                why="its layers keep more than keys and values, or bend attention, so each episode is read anew",
            )

    def train_step(self, batch: Batch, lr: float) -> StepStats:
        """Make the next version from the batch; raise RunFailed if a gradient is not finite, or if memory is short."""
        try:
            return self._step(batch, lr)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(_advice(self._settings, batch.version, str(error))) from error

    def _step(self, batch: Batch, lr: float) -> StepStats:
        started = time.perf_counter()
        if batch.trained_tokens == 0:
            raise ValueError(
                "a batch without trained tokens makes no step: settle its groups without training"
            )
        objective = self._settings.objective
        # Not in imitation: the first scoring pass makes the reference, which is the policy at the start of RL.
        scored = objective.needs_scores and not all(trace.demo for trace in batch.traces)
        scores = self._twice(lambda: self._score(batch)) if scored else None
        # All updates use the scores from before the first one: π_prox is the policy that the step begins with.
        settings = self._settings
        updates = build_updates(
            batch, scores, objective, settings.longest_episode_tokens, settings.seed
        )
        all_stats, norms, rates = zip(*self._take(updates, batch.version, lr), strict=True)
        # The learner waits for groups now: 1 GB with SmolLM2, which malloc would keep for the next micro-batch.
        give_back_freed(self._backend.device)
        # Each update's loss is a whole, normalised objective and is averaged; the other figures are sums over tokens.
        stats = replace(
            sum(all_stats, LossStats()),
            loss=mean(sum(stats.loss for stats in all_stats), len(norms)),
        )
        return step_stats(
            stats,
            updates=len(norms),
            grad_norm=max(norms),
            lr=mean(sum(rates), len(rates)),
            compute_s=time.perf_counter() - started,
            has_reference=objective.needs_reference,
            names=self._number_names,
        )

    @torch.no_grad()
    def logprob_gap_at(self, trace: Trace, version: int, weights: Path) -> float:
        """Score one trace with an earlier version's weights, in a second model that is gone afterwards.

        NaN where the GPU has no room for that model beside what training needs.
        """
        try:
            return self._gap(trace, version, weights)
        except torch.OutOfMemoryError:
            return math.nan
        finally:
            torch.cuda.empty_cache()  # an engine may share the GPU

    def _gap(self, trace: Trace, version: int, weights: Path) -> float:
        device = self._backend.device
        scorer = scorer_at(weights, self._settings.model_dir, device)
        gaps_N = logprob_gaps(scorer, trace, self._settings.temperature, device)
        return float(gaps_N[self._tensor(trace.versions_L[trace.mask_L] == version)].mean())

    def write_weights(self, path: Path) -> str:
        """Write the policy's weights as safetensors; return their digest, which only rank 0 knows."""
        return self.begin_write_weights(path).result()

    def begin_write_weights(self, path: Path) -> Future[str]:
        """Begin `write_weights`, and return once the weights are in host memory: gathered from all ranks, and copied.

        On a CPU they are there already, and what is written is the model itself: so `_check_saved` waits for the file.
        """
        wait([self._writing])  # its copy is about to be overwritten
        leads = self.rank == 0
        policy = copy_policy(
            self._backend.scorer.lm, self._backend.gather, self._host.copy if leads else None
        )
        self._host.wait()
        if leads:
            self._writing = self._writer.submit(policy.write, path)
        return self._writing

    def save(self, directory: Path, state: dict[str, Any]) -> None:
        """Write the training state, whole and by parameter name, and `engine.json` into `directory`."""
        self.begin_save(directory, state).result()

    def begin_save(self, directory: Path, state: dict[str, Any]) -> Future[None]:
        """Begin `save`; what it writes stays as it is until the files are there, because `_check_saved` waits for them.

        With several ranks all is written before this returns: their collectives must not meet those of a step.
        """
        self._check_saved()
        tensors = chain([(_RNG, torch.get_rng_state())], self._backend.state())
        # The learner's state travels with the tensors, by parameter name and without pickle: DeepSpeed's own files
        # fit only the stage and the number of ranks that wrote them (ADR 9).
        facts = {"state": state, "optimizer_steps": self._backend.steps, "base": self._base}
        if self.ranks == 1:
            self._saving = self._writer.submit(self._write, directory, tensors, facts)
            return self._saving
        self._write(directory if self.rank == 0 else None, tensors, facts)
        # No rank may look for the files before rank 0 has written them.
        self._backend.all_gather(torch.zeros(1, device=self._backend.device))
        return self._saving

    def _write(
        self, directory: Path | None, tensors: Iterable[tuple[str, Tensor]], facts: dict[str, Any]
    ) -> None:
        """Write a checkpoint. A rank without a directory takes part in the gathering and keeps nothing."""
        if directory is None:
            deque(tensors, maxlen=0)
            if self._reference_version is not None:
                self._reference.write(None)
            return
        directory.mkdir(parents=True, exist_ok=True)
        facts = facts | {"files": write_shards(tensors, directory)}
        if self._reference_version is not None:
            facts["reference_version"] = self._reference_version
            self._reference.write(directory / REFERENCE_FILE)
        (directory / ENGINE_FILE).write_text(
            json.dumps(facts, indent=2, sort_keys=True), encoding="utf-8"
        )

    def _check_saved(self) -> None:
        """Wait until the files that are being written have what they need: whatever they hold may change then."""
        wait([self._writing])
        started = time.perf_counter()
        wait([self._saving])  # its error, if there is one, belongs to who began it
        self.stalled_s += time.perf_counter() - started

    def load(self, directory: Path) -> dict[str, Any]:
        """Restore what `save` wrote, on any backend and any number of ranks, and return its `state`.

        Rank 0 alone reads `directory`, which other machines do not have. Raises CheckpointError if it is incomplete or
        of another model.
        """
        self._check_saved()
        broadcast = self._backend.broadcast
        written = share_json(read_engine_file(directory) if self.rank == 0 else None, broadcast)
        rng = {_RNG: list(torch.get_rng_state().shape)}
        with share_shards(directory, written["files"], self.rank, broadcast) as shards:
            check_same_model(shards.shapes, rng | self._backend.shapes, directory)
            if (base := written.get("base", {})) != self._base:
                raise CheckpointMismatch(
                    f"the adapters in {directory} stand beside other weights ({base}) than those of "
                    f"{self._settings.model_dir} ({self._base}): resume with the model that the run began with"
                )
            self._backend.load(shards.read, written["optimizer_steps"])
            torch.set_rng_state(shards.read(_RNG).cpu())
        # What it has belongs to steps that are rolled back.
        self._reference_version = None
        if "reference_version" in written and self._settings.objective.needs_reference:
            with share_shards(directory, [REFERENCE_FILE], self.rank, broadcast) as shards:
                self._reference.take((name, shards.read(name)) for name in shards.facts)
            self._reference_version = int(written["reference_version"])
        return dict(written["state"])

    def close(self) -> None:
        self._writer.shutdown()
        self._backend.close()

    def _take(
        self, updates: Sequence[list[TrainingSample]], version: int, lr: float
    ) -> Iterator[tuple[LossStats, float, float]]:
        """Take the updates of a batch, and leave out those after one that finds a KL above `loss.kl_max`."""
        kl_max = self._settings.objective.loss.kl_max
        for update in updates:
            taken = self._update(update, version, lr)
            yield taken
            # The same on every rank: the statistics are those of all ranks.
            if kl_max is not None and mean(taken[0].kl, taken[0].compared) > kl_max:
                return

    def _update(
        self, samples: list[TrainingSample], version: int, lr: float
    ) -> tuple[LossStats, float, float]:
        """Take one optimizer step; return what was measured before it, the gradient's norm and the rate."""
        objective = self._settings.objective
        own_stats = self._twice(lambda: self._add_gradients(samples, version, lr))
        # Before the step and over all ranks: each of them must scale the rate by the same effective sample size.
        stats = self._total(own_stats)
        # Without such an episode the ESS is NaN, and the rate would be too.
        if objective.correction.ess_lr and stats.episodes:
            lr *= math.sqrt(stats.ess_of_episodes)
        if lr and not stats.moving:
            # A rate of 0 pauses the optimizer, whose momentum would move the weights without any gradient. The version
            # is committed all the same, with the weights of the one before: its groups are settled.
            lr = 0.0
            if self.rank == 0:
                log.warning(
                    "nothing_trained",
                    version=version,
                    why="correction has dropped every token, or all advantages are 0: the weights stay as they are",
                )
        self._check_saved()
        rates = [lr]
        if isinstance(objective.advantage, CriticAdvantage):
            # Demonstrations have no target for a critic: what AdamW counts of it begins with the first episodes.
            rates.append(objective.advantage.critic_lr if stats.episodes else 0.0)
        grad_norm = self._backend.step(rates)
        # Only now: DeepSpeed clips and steps in one call. The weights may be spoiled, but no step is committed.
        if not math.isfinite(grad_norm):
            raise RunFailed(
                f"the gradient's norm is {grad_norm} in the step after version {version}: resume from the last "
                "checkpoint with a lower learning rate"
            )
        return stats, grad_norm, lr

    def _add_gradients(self, samples: list[TrainingSample], version: int, lr: float) -> LossStats:
        """Add up the gradient of this rank's micro-batches; return what was measured."""
        objective, rows = self._settings.objective, list[Tensor]()
        # At a rate of 0 the critic warms up. The policy's gradient would fill AdamW's moments all the same, and move it
        # later.
        critic_alone = objective.advantage.needs_critic and lr == 0.0
        for micro_batch in self._pack([sample.trace for sample in samples]):
            output = self._output(micro_batch)
            inputs = loss_inputs(samples, micro_batch, version, self._backend.device)
            loss_N = token_loss(output, inputs, objective, critic_alone=critic_alone)
            # The critic takes part even where no token has a target: ZeRO waits for the gradient of every parameter.
            self._backend.backward((loss_N + 0.0 * output.values_N).sum())
            rows.append(loss_stats(loss_N, output, inputs, objective))
        return LossStats.total(rows)

    def _twice(self, compute: Callable[[], T]) -> T:
        """Compute; where the memory is not enough, free what can be freed and compute from the beginning."""
        try:
            return compute()
        except torch.OutOfMemoryError as error:
            # Several ranks would have to agree on it, while one of them waits in a collective.
            if self.ranks > 1 or not self._backend.drop_gradients():
                raise
            log.warning(
                "out_of_memory",
                error=str(error),
                then="the micro-batches of this update are computed again",
            )
        # Not in the handler: its traceback holds the activations.
        torch.cuda.empty_cache()
        return compute()

    @torch.no_grad()
    def _score(self, batch: Batch) -> list[Scores]:
        """Return what policy, reference and critic say about the whole batch before the step, on every rank."""
        self._move_reference(batch.version)
        tokens = [trace.trained_tokens for trace in batch.traces]
        starts = np.cumsum([0, *tokens])
        # In the batch's order and not in that of the micro-batches, which depends on the number of ranks.
        table = torch.zeros(4, int(starts[-1]), dtype=torch.float64, device=self._backend.device)
        for together in scored_together(batch, self._settings.objective, self._settings.seed):
            for micro_batch in self._pack([batch.traces[index] for index in together]):
                rows = self._score_rows(micro_batch)
                indices = [together[index] for index in micro_batch.indices_B]
                ends = np.cumsum([0, *(tokens[index] for index in indices)])
                for index, start, end in zip(indices, ends, ends[1:], strict=False):
                    table[:, starts[index] : starts[index + 1]] = rows[:, start:end]
        # Each rank has scored its own traces and left 0 for the others: the sum is exact.
        whole = self._backend.add(table).cpu().numpy()
        return [Scores(*whole[:, start:end]) for start, end in pairwise(starts)]

    def _score_rows(self, micro_batch: MicroBatch) -> Tensor:
        """Return the four rows of `Scores` for the tokens of a micro-batch."""
        output = self._output(micro_batch)
        reference_N = torch.zeros_like(output.logprobs_N)
        if self._reference_version is not None:
            reference_N = self._reference.forward(*self._scorer_inputs(micro_batch)).logprobs_N
        rows = [output.logprobs_N, reference_N, output.values_N, output.collisions_N]
        return torch.stack(rows).double()

    def _move_reference(self, version: int) -> None:
        """Make the present policy the reference when RL begins, and every `refresh_every` versions."""
        objective = self._settings.objective
        if not objective.needs_reference:
            return
        every = objective.reference.refresh_every
        since = self._reference_version
        if since is not None and (every is None or version < since + every):
            return
        self._check_saved()  # before there is a reference: a checkpoint of the time before must not find it
        # The reference is a full model without adapters, so it takes the merged weights, as actors do.
        self._reference.take(self._weights())
        self._reference_version = version

    @cached_property
    def _reference(self) -> FrozenModel:
        device = self._backend.device
        return FrozenModel(
            frozen_scorer(self._settings.model_dir, device),
            self._backend,
        )

    def _pack(self, traces: Sequence[Trace]) -> list[MicroBatch]:
        """Return this rank's micro-batches."""
        # Every rank computes the whole plan and takes its part: packing is deterministic, so no rank has to be told.
        return pack(
            traces, self.ranks, self._settings.micro_batch_tokens, self._backend.scorer.packs
        )[self.rank]

    def _scorer_inputs(self, micro_batch: MicroBatch) -> list[Tensor]:
        return scorer_inputs(micro_batch, self._settings.temperature, self._backend.device)

    def _output(self, micro_batch: MicroBatch) -> ScorerOutput:
        return self._backend.forward(*self._scorer_inputs(micro_batch))

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return to_device(array, self._backend.device)

    def _total(self, own_stats: LossStats) -> LossStats:
        """Add up the statistics of all ranks, in rank order, so that every rank gets the same bits."""
        row = torch.tensor(own_stats.row(), dtype=torch.float64, device=self._backend.device)
        return sum(
            (LossStats.read(other.tolist()) for other in self._backend.all_gather(row)), LossStats()
        )

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the policy's weights under their Hugging Face names; adapters are merged into theirs."""
        for name, parts in policy_weights(self._backend.scorer.lm):
            yield name, merged(*self._backend.gather(parts)).detach()


def _advice(settings: EngineSettings, version: int, error: str) -> str:
    peak_gb = torch.cuda.max_memory_allocated() / 1e9
    return (
        f"the step after version {version} does not fit into memory ({error.splitlines()[0]}; torch's peak was "
        f"{peak_gb:.1f} GB): set learner.gradient_checkpointing (it is {str(settings.gradient_checkpointing).lower()}) "
        f"to true, lower learner.micro_batch_tokens ({settings.micro_batch_tokens}) towards the longest episode, or "
        f"raise learner.zero_stage ({settings.zero_stage}), which several ranks share; `horizonrl plan` computes it"
    )


def prepare_process(settings: EngineSettings) -> torch.device:
    """Seed torch, and take this rank's GPU or its share of the CPU; return the device to train on."""
    # oneDNN keeps a compiled kernel for each of the last 1024 shapes, and each batch brings new ones: 0.4 GB in vain.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")
    # Before the model is made: the critic's first layer is drawn at random.
    torch.manual_seed(settings.seed)
    if has_gpu(torch):
        return _take_gpu(settings.threads)
    torch.set_num_threads(settings.threads)
    if not multiplies_bfloat16():
        widen_products()
    return torch.device("cpu")


def _take_gpu(threads: int) -> torch.device:
    """Take this rank's GPU, and at least its share of the cores for what is done on the host."""
    local, ranks = (
        int(os.environ.get("LOCAL_RANK", "0")),
        int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    )
    if ranks > (count := torch.cuda.device_count()):
        raise ConfigError(
            f"learner.ranks is {ranks}, but this process sees {count} GPUs, and each rank needs one: lower "
            "learner.ranks, or give it more GPUs (CUDA_VISIBLE_DEVICES)"
        )
    torch.cuda.set_device(local)
    # cuDNN builds a plan for each new shape, and no two micro-batches have the same.
    torch.backends.cuda.enable_cudnn_sdp(False)
    # Ranks start with OMP_NUM_THREADS=1 (`spawn.py`), which is right where they compute on the CPU.
    torch.set_num_threads(max(threads, len(os.sched_getaffinity(0)) // ranks))
    return torch.device("cuda", local)


def build_scorer(settings: EngineSettings, device: torch.device) -> TokenScorer:
    """Load the model that is to be trained on `device`, with its adapters and its critic if the settings ask for them.

    It is in host memory: how it gets to the device is the backend's.
    """
    lm: Any = load_language_model(settings.model_dir)
    if settings.lora_rank:
        add_adapters(lm, settings.lora_rank)
    lm.eval()  # no dropout: the policy in training is the one that actors sample with
    if settings.gradient_checkpointing:
        checkpoint_layers(lm)
    elif settings.zero_stage < 3 and device.type == "cpu":
        # Not at stage 3, which would gather each layer's parameters once more. Not on a GPU, which would wait for the
        # host: each operator goes through Python (docs/performance.md).
        keep_products(lm)
    advantage = settings.objective.advantage
    return TokenScorer(lm, advantage.needs_critic, advantage.kind == "otb", device)
