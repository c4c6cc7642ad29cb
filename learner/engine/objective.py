"""The objective on one page: the updates that a batch makes, and the loss of each of its tokens.

Place in the flow: Batch → **samples** → micro-batches → **token loss** → gradient. The parts are pure functions of
their own: `advantage.py` (NumPy), `loss.py` and `correction.py` (torch). `build_updates` runs before the forward
pass, `token_loss` after it. Each token's loss is scaled so that the objective is a plain sum over all micro-batches:
neither the split into micro-batches nor the number of ranks changes the gradient.

Axes: N the trained tokens of one trace, or of one micro-batch.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from horizonrl.common.config.objective import GspoLoss, LossSection, Objective
from horizonrl.learner.algorithm.advantage import Estimate, Scores, estimates
from horizonrl.learner.algorithm.batch import Batch, Trace, by_episode
from horizonrl.learner.algorithm.loss import (
    KL_ESTIMATORS,
    LossInputs,
    imitation_loss,
    importance,
    k3,
    measure_policy_loss,
    policy_clipped,
    policy_loss,
)
from horizonrl.learner.engine.api import StepStats
from horizonrl.learner.engine.model.model import ScorerOutput
from horizonrl.learner.engine.model.packing import MicroBatch
from horizonrl.learner.engine.transfer import to_device

CRITIC_SHARE = 1e-2
"""Weight of the critic's loss. It keeps the critic's part of the clipped gradient norm small next to the policy's. The
critic learns as fast: AdamW's step does not depend on the gradient's scale."""


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """One trace, ready to be trained on."""

    trace: Trace
    estimate: Estimate
    scores: Scores | None
    scale: float
    """Weight of each of its tokens in the update."""


def build_updates(
    batch: Batch,
    scores: Sequence[Scores] | None,
    objective: Objective,
    longest_episode_tokens: int,
    seed: int = 0,
) -> list[list[TrainingSample]]:
    """Return the updates of a batch: for each, the samples of whole groups, in the order of the log."""
    # Over the whole batch: neither baselines nor whitening may depend on how it is split into updates.
    made = estimates(batch.traces, scores, objective)
    updates = []
    for indices in _update_indices(batch, objective.loss, seed):
        taken = [batch.traces[index] for index in indices]
        # A demonstration is cloned whole, however it ended.
        masked = [
            objective.advantage.truncated == "mask" and t.truncated and not t.demo for t in taken
        ]
        scales = token_scales(taken, masked, objective.loss, longest_episode_tokens)
        updates.append(
            [
                TrainingSample(
                    batch.traces[index],
                    made[index],
                    scores[index] if scores else None,
                    scale,
                )
                for index, scale in zip(indices, scales, strict=True)
            ]
        )
    return updates


def scored_together(batch: Batch, objective: Objective, seed: int = 0) -> list[list[int]]:
    """Return the traces that the scoring pass packs together, by index."""
    loss = objective.loss
    if not isinstance(loss, GspoLoss):
        return [list(range(len(batch.traces)))]
    # As in its update of the first epoch: in bfloat16 a token's logprob depends on what it is packed with, with SmolLM2
    # by up to 0.5, and GSPO's ratio must be 1 before an update.
    updates = _update_indices(batch, loss, seed)
    return updates[: len(updates) // loss.epochs]


def _update_indices(batch: Batch, settings: LossSection, seed: int) -> list[list[int]]:
    """Return the traces of each update by index: whole groups, in the order of the log."""
    groups = list(dict.fromkeys(trace.group for trace in batch.traces))
    return [
        [index for index, trace in enumerate(batch.traces) if trace.group in minibatch]
        for minibatch in _minibatches(groups, settings, f"{seed}/{batch.version}")
    ]


def _minibatches(groups: Sequence[int], settings: LossSection, key: str) -> list[set[int]]:
    """Return the groups of each update, epoch by epoch: in the order of the log, or shuffled by a hash of `key`."""
    # No more parts than there are groups: `array_split` would fill up with empty ones.
    parts, minibatches = min(settings.minibatches, len(groups)), []
    for epoch in range(settings.epochs):
        # By hash, not by NumPy's generator, whose draws may change from one release to the next (replay).
        order = groups
        if settings.shuffle:
            keys = {
                group: xxhash.xxh3_64_intdigest(f"{key}/{epoch}/{group}".encode())
                for group in groups
            }
            order = sorted(groups, key=keys.__getitem__)
        minibatches += [set(part.tolist()) for part in np.array_split(order, parts)]
    return minibatches


def token_scales(
    traces: Sequence[Trace],
    masked: Sequence[bool],
    settings: LossSection,
    longest_episode_tokens: int,
) -> list[float]:
    """Return the weight of each trace's tokens by `loss.normalisation`; 0 for a masked trace."""
    # A masked episode leaves the denominator too, unlike a token that `correction` masks.
    kept = [trace for trace, left_out in zip(traces, masked, strict=True) if not left_out]
    tokens, in_all = Counter[int](), sum(trace.trained_tokens for trace in kept)
    for trace in kept:
        tokens[trace.group] += trace.trained_tokens
    # Episodes and not traces: how often an agent branches must not change what its episode weighs.
    episodes = by_episode(traces)
    updates_own = [0] * len(traces)
    for indices in episodes:
        for index in indices:
            updates_own[index] = sum(traces[other].trained_tokens for other in indices)
    # The traces of an episode are masked together: it was truncated, not one of its branches.
    counted = sum(not masked[indices[0]] for indices in episodes)

    def share(index: int) -> int:
        match settings.counted_by:
            case "token":
                return in_all
            case "sequence":
                return counted * updates_own[index]
            case "prompt":
                return len(tokens) * tokens[traces[index].group]
            case "constant":
                return counted * longest_episode_tokens

    return [0.0 if left_out else 1.0 / share(index) for index, left_out in enumerate(masked)]


def loss_inputs(
    samples: Sequence[TrainingSample], micro_batch: MicroBatch, version: int, device: torch.device
) -> LossInputs:
    """Return the inputs of the loss for a micro-batch's tokens, in its order; `version` is the one in training."""
    rows = [samples[index] for index in micro_batch.indices_B]

    def column(values: Sequence[NDArray[Any]], dtype: Any = np.float32) -> Tensor:
        # `concatenate` refuses an empty list, and a micro-batch of padding has no rows.
        return to_device(
            np.concatenate([np.empty(0, dtype), *(np.asarray(part, dtype) for part in values)]),
            device,
        )

    # Without a scoring pass no term of the objective reads these columns.
    unscored = [np.zeros(row.trace.trained_tokens) for row in rows]
    scored = [row.scores for row in rows if row.scores is not None]
    return LossInputs(
        logprobs_N=column([row.trace.logprobs_L[row.trace.mask_L] for row in rows]),
        advantages_N=column([row.estimate.advantages_N for row in rows]),
        lags_N=column([version - row.trace.versions_L[row.trace.mask_L] for row in rows], np.int32),
        episodes_N=to_device(micro_batch.episodes_N, device),
        demo_N=to_device(micro_batch.demo_N, device),
        scales_N=column([np.full(row.trace.trained_tokens, row.scale) for row in rows]),
        proximal_N=column([scores.logprobs_N for scores in scored] or unscored),
        reference_N=column([scores.reference_N for scores in scored] or unscored),
        targets_N=column([row.estimate.targets_N for row in rows]),
        episodes=len(rows),
    )


def token_loss(
    output: ScorerOutput, inputs: LossInputs, objective: Objective, *, critic_alone: bool = False
) -> Tensor:
    """Return each token's share of the objective, which is to be minimised; if `critic_alone`, without the policy's."""
    loss_N = policy_loss(output.logprobs_N, inputs, objective)
    if objective.loss.entropy > 0:
        loss_N = loss_N - objective.loss.entropy * output.entropies_N
    if objective.adds_kl:
        estimator = KL_ESTIMATORS[objective.reference.estimator]
        loss_N = loss_N + objective.reference.kl * estimator(output.logprobs_N, inputs.reference_N)
    # After entropy and KL, and instead of them: a demonstration's loss is −log π alone.
    loss_N = torch.where(inputs.demo_N, imitation_loss(output.logprobs_N), loss_N)
    if critic_alone:
        loss_N = 0.0 * loss_N  # not left out: ZeRO waits for the gradient of every parameter
    if objective.advantage.needs_critic:
        # Demonstrations have no targets, so nothing is added to theirs.
        loss_N = loss_N + CRITIC_SHARE * critic_error(output, inputs).square() / 2.0
    return loss_N * inputs.scales_N


def critic_error(output: ScorerOutput, inputs: LossInputs) -> Tensor:
    """Return V − target; 0 where there is no target."""
    return torch.where(
        inputs.targets_N.isnan(), 0.0, output.values_N - inputs.targets_N.nan_to_num()
    )


@dataclass(frozen=True, slots=True)
class LossStats:
    """Sums over trained tokens. They add up over micro-batches, ranks and updates."""

    tokens: float = 0.0
    loss: float = 0.0
    """The objective itself, already scaled."""
    entropy: float = 0.0
    compared: float = 0.0
    """Tokens with a behaviour policy, which demonstrations lack. `kl` to `reference_kl` are sums over these."""
    kl: float = 0.0
    gap: float = 0.0
    fresh: float = 0.0
    gap_fresh: float = 0.0
    clipped: float = 0.0
    importance: float = 0.0
    importance_squared: float = 0.0
    reference_kl: float = 0.0
    episodes: float = 0.0
    """Trained episodes with a behaviour policy. The two products are sums over these."""
    product: float = 0.0
    """Π r over an episode, relative to the largest: that of 10,000 tokens may be e^-1000."""
    product_squared: float = 0.0
    valued: float = 0.0
    """Tokens with a target of the critic."""
    value_squared: float = 0.0
    moving: float = 0.0
    """Tokens that move the policy: neither dropped by a mask, nor of weight or advantage 0."""
    log_product_max: float = -math.inf
    """Not a sum but the logarithm of the largest Π r, to which both products are relative."""
    importance_max: float = 0.0
    """Not a sum but the largest."""
    own: tuple[float, ...] = field(default=(), kw_only=True)
    """The named numbers of a loss of another package, over the compared tokens."""

    def __add__(self, other: "LossStats") -> "LossStats":
        log_max = max(self.log_product_max, other.log_product_max)
        rows = (self._relative_to(log_max).row(), other._relative_to(log_max).row())
        # The sum begins with one that has no numbers.
        added = LossStats.read([sum(pair) for pair in zip_longest(*rows, fillvalue=0.0)])
        largest = max(self.importance_max, other.importance_max)
        return replace(added, importance_max=largest, log_product_max=log_max)

    def _relative_to(self, log_max: float) -> "LossStats":
        factor = math.exp(self.log_product_max - log_max) if self.episodes else 0.0
        return replace(
            self, product=self.product * factor, product_squared=self.product_squared * factor**2
        )

    def row(self) -> list[float]:
        """Return the sums as one row, which `read` takes."""
        *sums, numbers = astuple(self)
        return [*sums, *numbers]

    @staticmethod
    def read(row: Sequence[float]) -> "LossStats":
        sums = len(fields(LossStats)) - 1
        return LossStats(*row[:sums], own=tuple(row[sums:]))

    @staticmethod
    def total(rows: Sequence[Tensor]) -> "LossStats":
        """Add up what `loss_stats` returned for micro-batches, with one transfer from the device."""
        return sum((LossStats.read(row) for row in torch.stack([*rows]).tolist()), LossStats())

    @property
    def ess(self) -> float:
        """Effective sample size (Σr)² / (N Σr²): 1 if all tokens weigh the same."""
        return mean(self.importance**2, self.compared * self.importance_squared)

    @property
    def ess_of_episodes(self) -> float:
        """The same for whole episodes with the weight Π r (arXiv 2602.17616); far lower for long ones."""
        return mean(self.product**2, self.episodes * self.product_squared)


def mean(total: float, count: float) -> float:
    """Return total / count; NaN if nothing was counted."""
    return total / count if count else math.nan


@torch.no_grad()
def loss_stats(
    loss_N: Tensor, output: ScorerOutput, inputs: LossInputs, objective: Objective
) -> Tensor:
    """Sum up one micro-batch: the fields of `LossStats`, in float64 and on the device, which is not waited for.

    `kl` is the k3 estimate of KL(μ ‖ π), r − 1 − log r, which is unbiased because the tokens are samples of μ.
    `reference_kl` is that of KL(π ‖ π_ref), 0 without a reference.
    """
    compared_N = (~inputs.demo_N).to(loss_N.dtype)
    ratio_N = importance(output.logprobs_N, inputs) * compared_N
    # ratio_N is 0 at demonstrations, and its log −∞.
    log_ratio_N = torch.where(inputs.demo_N, 0.0, ratio_N.log())
    fresh_N = (inputs.lags_N == 0) * compared_N
    gap_N = (output.logprobs_N - inputs.logprobs_N).abs()
    clipped_N = policy_clipped(output.logprobs_N, inputs, objective) * compared_N
    reference_N = (
        k3(output.logprobs_N, inputs.reference_N)
        if objective.needs_reference
        else torch.zeros_like(loss_N)
    )
    columns = [torch.ones_like(loss_N), loss_N, output.entropies_N, compared_N]
    columns += [
        ratio_N - compared_N - log_ratio_N,
        gap_N * compared_N,
        fresh_N,
        gap_N * fresh_N,
        clipped_N,
    ]
    columns += [ratio_N, ratio_N.square(), reference_N * compared_N]
    log_product_E, counted_E = log_products(output.logprobs_N - inputs.logprobs_N, inputs)
    log_max = log_product_E.amax() if inputs.episodes else log_product_E.new_tensor(-math.inf)
    # Without any episode both are −∞, whose difference is NaN.
    product_E = torch.where(counted_E, log_product_E - log_max, -math.inf).exp()
    columns += [counted_E, product_E, product_E.square()]
    columns += [(~inputs.targets_N.isnan()).to(loss_N.dtype), critic_error(output, inputs).square()]
    policy_N, numbers = measure_policy_loss(output.logprobs_N, inputs, objective)
    columns += [_moving(policy_N, inputs, objective)]
    largest = ratio_N.amax() if ratio_N.numel() else ratio_N
    weighted = [number_N * compared_N for number_N in numbers.values()]
    columns += [log_max, largest, *weighted]
    return torch.stack([column.detach().double().sum() for column in columns])


def _moving(policy_N: Tensor, inputs: LossInputs, objective: Objective) -> Tensor:
    """Return whether each token moves the policy, by its `policy_loss`."""
    if objective.loss.entropy > 0 or objective.adds_kl:
        return inputs.scales_N > 0  # both terms reach tokens that a mask drops
    return ((policy_N != 0) | inputs.demo_N) & (inputs.scales_N > 0)


def log_products(log_ratio_N: Tensor, inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """Return log Π r of each episode in float64, and whether it is trained and no demonstration; else it is −∞."""
    counted_N = ~inputs.demo_N & (inputs.scales_N > 0)
    # By their places and not by a mask: how many a mask leaves is not known before a GPU has computed it.
    sums_E = log_ratio_N.new_zeros(inputs.episodes, dtype=torch.float64)
    tokens_E = sums_E.index_add(0, inputs.episodes_N, counted_N.double())
    sums_E = sums_E.index_add(
        0, inputs.episodes_N, torch.where(counted_N, log_ratio_N, 0.0).double()
    )
    counted_E = tokens_E > 0
    return torch.where(counted_E, sums_E, -math.inf), counted_E


def two_tokens() -> tuple[Tensor, LossInputs]:
    """Return the logprobs and inputs of two tokens of one episode, to try a loss with."""
    zeros_N, ones_N = torch.zeros(2), torch.ones(2)
    inputs = LossInputs(
        logprobs_N=-ones_N,
        advantages_N=torch.tensor([1.0, -1.0]),
        lags_N=zeros_N.int(),
        episodes_N=zeros_N.long(),
        demo_N=zeros_N.bool(),
        scales_N=ones_N,
        proximal_N=-ones_N,
        reference_N=-ones_N,
        targets_N=zeros_N,
        episodes=1,
    )
    return -ones_N, inputs


def step_stats(
    stats: LossStats,
    updates: int,
    grad_norm: float,
    lr: float,
    compute_s: float,
    has_reference: bool,
    names: Sequence[str] = (),
) -> StepStats:
    """Return what a batch measured, from the sums over its updates."""
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
        updates=updates,
        numbers={
            name: mean(total, stats.compared) for name, total in zip(names, stats.own, strict=True)
        },
    )
