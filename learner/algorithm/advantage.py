"""Turn rewards into advantages: how much better than expected the outcome of each generated token was.

Place in the flow: Batch → **advantages** → loss. Pure functions of NumPy arrays in float64; no torch. Axes: N the
generated tokens of one trace, K its turns, G the episodes of a group, M all that is compared within a group (its
episodes, or all their turns). To add a kind, name it in `_estimated`, or in `COMPARISONS` if it compares siblings.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from horizonrl.common.config.objective import AdvantageSection, Objective
from horizonrl.learner.intake.batch import Trace

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

STD_FLOOR = 1e-6
"""Added to a standard deviation, so that equal values give zeros instead of NaN."""


@dataclass(frozen=True, slots=True)
class Scores:
    """What the models output for a trace's N generated tokens before the step; zeros for a model that is not used."""

    logprobs_N: Floats
    """log π at the start of the step."""
    reference_N: Floats
    """log-probability under the reference."""
    values_N: Floats
    """The critic's estimate of the return from the token on."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a trace's N generated tokens are trained with."""

    advantages_N: Floats
    targets_N: Floats
    """The critic's targets; NaN at tokens without one."""


# ---- comparisons within a group: float64 [M] → float64 [M]


def grpo(returns_M: Floats) -> Floats:
    """Return (R − mean) / (std + 1e-6), with the population's std (DeepSeekMath, arXiv 2402.03300, section 4.1.2)."""
    # verl and TRL divide by the sample's std, which is √(G / (G − 1)) times as large. AdamW cancels a constant factor
    # of the loss, but a coefficient beside it (`reference.kl`, `loss.entropy`) then weighs differently.
    return np.asarray((returns_M - returns_M.mean()) / (returns_M.std() + STD_FLOOR))


def dr_grpo(returns_M: Floats) -> Floats:
    """Return R − mean: without the division that favours easy and hard tasks (Dr. GRPO, arXiv 2503.20783)."""
    return np.asarray(returns_M - returns_M.mean())


def rloo(returns_M: Floats) -> Floats:
    """Return R minus the mean of the others: an unbiased baseline (RLOO, arXiv 2402.14740)."""
    # R minus the mean of the others is G / (G − 1) times R minus the mean of all.
    return dr_grpo(returns_M) * (returns_M.size / (returns_M.size - 1))


def uncompared(returns_M: Floats) -> Floats:
    """Return R."""
    return returns_M


COMPARISONS: Mapping[str, Callable[[Floats], Floats]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_pp_baseline": dr_grpo,
    "return": uncompared,
}


# ---- along one episode


def to_go(rewards_S: Floats, discount: float) -> Floats:
    """Return Σ_{j≥s} γ^{j−s} r_j of every step s."""
    returns_S, ahead = np.empty_like(rewards_S), 0.0
    for s in reversed(range(len(rewards_S))):
        returns_S[s] = ahead = rewards_S[s] + discount * ahead
    return returns_S


def gae(rewards_S: Floats, values_S: Floats, discount: float, decay: float) -> Floats:
    """Return Σ_l (γλ)^l δ_{s+l}, δ_s = r_s + γ V_{s+1} − V_s, V = 0 after the end (GAE, arXiv 1506.02438, eq. 16)."""
    # V is 0 after the last turn even of a truncated episode: the horizon is part of the task.
    return to_go(rewards_S + discount * np.append(values_S[1:], 0.0) - values_S, discount * decay)


def vtrace(rewards_K: Floats, values_K: Floats, ratios_K: Floats, settings: AdvantageSection) -> tuple[Floats, Floats]:
    """Return the advantages r_k + γ v_{k+1} − V_k and the targets v_k of V-trace (IMPALA, arXiv 1802.01561, eq. 1).

    v_k = V_k + ρ_k δ_k + γ c_k (v_{k+1} − V_{k+1}), ρ = min(ρ̄, w), c = λ min(c̄, w). IMPALA also weighs the
    advantage with ρ_k; here the loss does so, since its ratio is π/μ.
    """
    gamma, targets_K, surplus = settings.discount, np.empty_like(values_K), 0.0
    next_K = np.append(values_K[1:], 0.0)
    # `ratio_cap` is both ρ̄ and c̄, so that c is λρ and one array serves for both.
    rho_K = np.minimum(ratios_K, settings.ratio_cap)
    for k in reversed(range(len(values_K))):
        delta = rewards_K[k] + gamma * next_K[k] - values_K[k]
        surplus = rho_K[k] * (delta + gamma * settings.trace_decay * surplus)
        targets_K[k] = values_K[k] + surplus
    return rewards_K + gamma * np.append(targets_K[1:], 0.0) - values_K, targets_K


# ---- the batch


@dataclass(frozen=True, slots=True)
class ScoredTrace:
    """One episode of a batch, seen by its N generated tokens and its K turns."""

    index: int
    """Its place in the batch."""
    rewards_N: Floats
    """The reward of a turn at its last token."""
    penalties_N: Floats
    """−β (log μ − log π_ref) if the KL to the reference is subtracted from the reward (k1), else 0."""
    turns_N: Ints
    """The turn of each token, counted from 0."""
    first_K: Ints
    """The first token of each turn."""
    mu_N: Floats
    scores: Scores

    def by_turn(self, values_N: Floats) -> Floats:
        """Return the sum over each turn."""
        return np.asarray(np.add.reduceat(values_N, self.first_K))


def estimates(traces: Sequence[Trace], scores: Sequence[Scores] | None, objective: Objective) -> list[Estimate]:
    """Return what each trace is trained with. `scores` has one entry per trace if `objective.needs_scores`.

    Demonstrations are cloned: they take part in no comparison, and their advantages are 0.
    """
    groups: defaultdict[int, list[ScoredTrace]] = defaultdict(list)
    for index, trace in enumerate(traces):
        if not trace.demo:
            groups[trace.group].append(_played(index, trace, scores[index] if scores else None, objective))
    made: dict[int, Estimate] = {}
    for episodes in groups.values():
        indices = [episode.index for episode in episodes]
        made |= zip(indices, _estimated(episodes, objective.advantage), strict=True)
    if objective.advantage.kind in WHITENED:
        # Masked episodes carry no loss: were they counted, the tokens that are trained would not have mean 0.
        masks = objective.advantage.truncated == "mask"
        trained = [index for index in made if not (masks and traces[index].truncated)]
        made = _whitened(made, trained)
    return [made.get(index) or _untargeted(np.zeros(trace.trained_tokens)) for index, trace in enumerate(traces)]


def has_signal(returns: Sequence[Sequence[float]], settings: AdvantageSection) -> bool:
    """Return whether a group with these rewards, per episode and turn, has an advantage other than zero."""
    values = [value for rewards in returns for value in _credits(np.asarray(rewards), settings)]
    if settings.kind == "return":
        return max(map(abs, values), default=0.0) > STD_FLOOR
    # Equal returns need not be equal in their last bits: they are sums of the same rewards in another order.
    return not settings.group_relative or max(values) - min(values) > STD_FLOOR


WHITENED = ("reinforce_pp", "reinforce_pp_baseline", "gae", "vtrace")
"""Kinds whose advantages are scaled to mean 0 and variance 1 over the trained tokens of the batch."""


def _played(index: int, trace: Trace, scores: Scores | None, objective: Objective) -> ScoredTrace:
    mask_L = trace.mask_L
    turns_N, mu_N = trace.turns_L[mask_L], trace.logprobs_L[mask_L].astype(np.float64)
    # Turns are counted from 0, so a −1 in front makes the first token begin one.
    begins_N = np.diff(turns_N, prepend=-1) != 0
    zeros_N = np.zeros(len(mu_N))
    scores = scores or Scores(zeros_N, zeros_N, zeros_N)
    # μ and not π: the tokens are samples of μ, so that this estimates KL(μ ‖ π_ref).
    penalties_N = -objective.reference.kl * (mu_N - scores.reference_N) if objective.penalised else zeros_N
    return ScoredTrace(
        index=index,
        rewards_N=trace.rewards_L[mask_L].astype(np.float64),
        penalties_N=penalties_N,
        turns_N=np.cumsum(begins_N) - 1,
        first_K=np.flatnonzero(begins_N),
        mu_N=mu_N,
        scores=scores,
    )


def _estimated(group: Sequence[ScoredTrace], settings: AdvantageSection) -> list[Estimate]:
    match settings.kind:
        case "gae":
            return [_gae(episode, settings) for episode in group]
        case "vtrace":
            return [_vtrace(episode, settings) for episode in group]
        case "reinforce_pp":
            return [_untargeted(_ahead(e, e.rewards_N + e.penalties_N, settings.discount)) for e in group]
        case "dpo":
            return _dpo(group, settings.dpo_beta)
        case kind:
            return _compared(group, COMPARISONS[kind], settings)


def _compared(
    group: Sequence[ScoredTrace], compare: Callable[[Floats], Floats], settings: AdvantageSection
) -> list[Estimate]:
    """Compare the returns of a group's episodes with one another; with credit by turn, all returns from a turn on.

    A penalty for the KL counts as reward. Only reinforce_pp_baseline keeps it out of the comparison, per token.
    """
    penalty_apart = settings.kind == "reinforce_pp_baseline"
    rewards = [e.by_turn(e.rewards_N if penalty_apart else e.rewards_N + e.penalties_N) for e in group]
    credits = [_credits(rewards_K, settings) for rewards_K in rewards]
    # With credit by turn the comparison is over all turns of the group, so a longer episode counts more in the mean.
    compared_M, ends = compare(np.concatenate(credits)), np.cumsum([0, *map(len, credits)])
    made = []
    for episode, (start, end) in zip(group, pairwise(ends), strict=True):
        own_K = np.broadcast_to(compared_M[start:end], episode.first_K.shape)  # one credit per episode, or one per turn
        ahead_N = _ahead(episode, episode.penalties_N, settings.discount) if penalty_apart else 0.0
        made.append(_untargeted(own_K[episode.turns_N] + ahead_N))
    return made


def _credits(rewards_K: Floats, settings: AdvantageSection) -> Floats:
    """Return the episode's return as one value, or the return from each turn on."""
    return to_go(rewards_K, settings.discount) if settings.credit == "turn" else rewards_K.sum(keepdims=True)


def _ahead(episode: ScoredTrace, values_N: Floats, discount: float) -> Floats:
    """Return the sum of each token's own and later values, discounted by turn (REINFORCE++, arXiv 2501.03262)."""
    # γ is per turn: later tokens of the same turn count in full, and only the turns that follow are discounted.
    later_K = np.append(to_go(episode.by_turn(values_N), discount)[1:], 0.0) * discount
    last_K = np.append(episode.first_K[1:], len(values_N)) - 1
    suffixes_N = to_go(values_N, 1.0)
    after_K = np.append(suffixes_N, 0.0)[last_K + 1]
    return np.asarray(suffixes_N - after_K[episode.turns_N] + later_K[episode.turns_N])


def _gae(episode: ScoredTrace, settings: AdvantageSection) -> Estimate:
    rewards_N, values_N = episode.rewards_N + episode.penalties_N, episode.scores.values_N
    if settings.level == "token":
        advantages_N = gae(rewards_N, values_N, settings.discount, settings.trace_decay)
        return Estimate(advantages_N, advantages_N + values_N)
    # The value before a turn's first token is the one that has read everything but the turn itself.
    values_K = values_N[episode.first_K]
    advantages_K = gae(episode.by_turn(rewards_N), values_K, settings.discount, settings.trace_decay)
    return _by_turn(episode, advantages_K, advantages_K + values_K)


def _vtrace(episode: ScoredTrace, settings: AdvantageSection) -> Estimate:
    """V-trace over turns, a turn's weight being the geometric mean of its tokens' π/μ."""
    tokens_K = np.diff(np.append(episode.first_K, len(episode.mu_N)))
    # The mean and not the product: over a long turn a product says little (1.1^100 is 13,780).
    ratios_K = np.exp(np.clip(episode.by_turn(episode.scores.logprobs_N - episode.mu_N) / tokens_K, -20.0, 20.0))
    rewards_K = episode.by_turn(episode.rewards_N + episode.penalties_N)
    return _by_turn(episode, *vtrace(rewards_K, episode.scores.values_N[episode.first_K], ratios_K, settings))


def _by_turn(episode: ScoredTrace, advantages_K: Floats, targets_K: Floats) -> Estimate:
    """Spread a turn's advantage over its tokens; its target goes to its first, where the critic values the turn."""
    targets_N = np.full(len(episode.mu_N), np.nan)
    targets_N[episode.first_K] = targets_K
    return Estimate(advantages_K[episode.turns_N], targets_N)


def _dpo(group: Sequence[ScoredTrace], beta: float) -> list[Estimate]:
    """Return ± β σ(−m) of each pair's tokens: with loss −A log π that is the gradient of DPO's −log σ(m).

    m = β (log π/π_ref of the better − log π/π_ref of the worse episode), arXiv 2305.18290, eq. 7. The best episode is
    paired with the worst, the second best with the second worst, and so on while their returns differ.
    """
    ranked = sorted(range(len(group)), key=lambda index: (-group[index].rewards_N.sum(), index))
    sides = [0.0] * len(group)
    # With an odd number of episodes the middle one has no partner, and keeps 0.
    for better, worse in zip(ranked[: len(group) // 2], reversed(ranked), strict=False):
        if group[better].rewards_N.sum() > group[worse].rewards_N.sum():
            gains = [(e.scores.logprobs_N - e.scores.reference_N).sum() for e in (group[better], group[worse])]
            # At 50 the sigmoid is 1 to the last bit of a float64, and exp is far from its overflow.
            sides[better] = beta / (1.0 + np.exp(np.clip(beta * (gains[0] - gains[1]), -50.0, 50.0)))
            sides[worse] = -sides[better]
    return [_untargeted(np.full(len(episode.mu_N), side)) for episode, side in zip(group, sides, strict=True)]


def _whitened(made: Mapping[int, Estimate], trained: Sequence[int]) -> dict[int, Estimate]:
    """Scale the advantages to mean 0 and variance 1 over the trained tokens of the batch."""
    if not trained:
        return dict(made)
    tokens = np.concatenate([made[index].advantages_N for index in trained])
    mean, std = tokens.mean(), tokens.std() + STD_FLOOR
    # The targets keep the scale of the rewards: the critic predicts returns, whatever else is in the batch.
    return {index: Estimate((own.advantages_N - mean) / std, own.targets_N) for index, own in made.items()}


def _untargeted(advantages_N: Floats) -> Estimate:
    return Estimate(advantages_N, np.full(len(advantages_N), np.nan))
