"""Turn rewards into advantages: how much better than expected the outcome of each generated token was.

Place in the flow: Batch → **advantages** → loss. Pure functions of NumPy arrays in float64; no torch. Axes: N the
trained tokens of one trace or one episode, K the episode's turns, J those of them that are trained, G the episodes of a
group, M all that is compared within a group (its episodes, or all their turns). To add a kind, name it in `_estimated`,
or in `COMPARISONS` if it compares siblings.

An episode may have several traces, one for each branch. It is estimated as a whole: its return is the sum over all its
turns, whatever their branch; it stands in its group's comparison once; and the advantage reaches the trained tokens of
every branch (docs/algorithms.md, "Episodes of several branches").
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horizonrl.common.config.objective import (
    AdvantageSection,
    CreditedAdvantage,
    DpoAdvantage,
    GaeAdvantage,
    GrpoAdvantage,
    Objective,
    OwnAdvantage,
    ReinforcePpAdvantage,
    VtraceAdvantage,
)
from horizonrl.learner.algorithm.batch import Trace, by_episode
from horizonrl.learner.algorithm.credit import by_state, optimal_token_baseline, to_go
from horizonrl.learner.algorithm.own import own_comparison
from horizonrl.learner.algorithm.reward import STD_FLOOR

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Scores:
    """What the models output for a trace's N generated tokens before the step; zeros for a model that is not used."""

    logprobs_N: Floats
    """log π at the start of the step."""
    reference_N: Floats
    """log-probability under the reference."""
    values_N: Floats
    """The critic's estimate of the return from the token on."""
    collisions_N: Floats
    """Σ π² over the vocabulary."""


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


def maxrl(returns_M: Floats) -> Floats:
    """Return (R − mean) / mean; zeros where the mean is not above 0 (MaxRL, arXiv 2602.02710).

    For rewards of 0 and 1 this is the gradient of log p instead of p, p the chance of success: rare successes weigh
    more. It means nothing for negative returns.
    """
    mean = returns_M.mean()
    return dr_grpo(returns_M) / mean if mean > STD_FLOOR else np.zeros_like(returns_M)


def uncompared(returns_M: Floats) -> Floats:
    """Return R."""
    return returns_M


COMPARISONS: Mapping[str, Callable[[Floats], Floats]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "maxrl": maxrl,
    "reinforce_pp_baseline": dr_grpo,
    "return": uncompared,
}


# ---- along one episode


def gae(rewards_S: Floats, values_S: Floats, discount: float, decay: float) -> Floats:
    """Return Σ_l (γλ)^l δ_{s+l}, δ_s = r_s + γ V_{s+1} − V_s, V = 0 after the end (GAE, arXiv 1506.02438, eq. 16)."""
    # V is 0 after the last turn even of a truncated episode: the horizon is part of the task.
    return to_go(rewards_S + discount * np.append(values_S[1:], 0.0) - values_S, discount * decay)


def vtrace(
    rewards_K: Floats, values_K: Floats, ratios_K: Floats, settings: VtraceAdvantage
) -> tuple[Floats, Floats]:
    """Return the advantages r_k + γ v_{k+1} − V_k and the targets v_k of V-trace (IMPALA, arXiv 1802.01561, eq. 1).

    v_k = V_k + ρ_k δ_k + γ c_k (v_{k+1} − V_{k+1}), ρ = min(1, w), c = λ ρ: the bounds ρ̄ and c̄ are 1, as in
    its experiments. IMPALA also weighs the advantage with ρ_k; here the loss does so, since its ratio is π/μ.
    """
    gamma, targets_K, surplus = settings.discount, np.empty_like(values_K), 0.0
    next_K = np.append(values_K[1:], 0.0)
    rho_K = np.minimum(ratios_K, 1.0)
    for k in reversed(range(len(values_K))):
        delta = rewards_K[k] + gamma * next_K[k] - values_K[k]
        surplus = rho_K[k] * (delta + gamma * settings.trace_decay * surplus)
        targets_K[k] = values_K[k] + surplus
    return rewards_K + gamma * np.append(targets_K[1:], 0.0) - values_K, targets_K


# ---- the batch


@dataclass(frozen=True, slots=True)
class ScoredEpisode:
    """One episode of a batch, seen by its N trained tokens, in order of time over all branches, and its K turns."""

    indices: tuple[int, ...]
    """The places of its traces in the batch."""
    order_N: Ints
    """The token at each place in time, as its place in the traces one after the other."""
    rewards_N: Floats
    """The reward of a turn at its last token."""
    penalties_N: Floats
    """−β (log μ − log π_ref) if the KL to the reference is subtracted from the reward (k1), else 0."""
    turns_N: Ints
    """The turn of each token, counted from 0."""
    first_J: Ints
    """The first token of each trained turn."""
    untrained_K: Floats | None
    """The rewards of the turns without loss, and 0 for the others; None if each turn of the episode is trained."""
    mu_N: Floats
    scores: Scores
    states_K: tuple[str, ...]
    """The state in which each turn was taken; empty for a turn without one."""

    @property
    def turns(self) -> int:
        return len(self.first_J) if self.untrained_K is None else len(self.untrained_K)

    def by_turn(self, values_N: Floats) -> Floats:
        """Return the sum over each turn [K]."""
        sums_J = np.add.reduceat(values_N, self.first_J)
        if self.untrained_K is None:
            return np.asarray(sums_J)
        sums_K = np.zeros(self.turns)
        sums_K[self.turns_N[self.first_J]] = sums_J
        return sums_K

    def rewards_by_turn(self, *, penalised: bool = True) -> Floats:
        """Return the reward of each turn [K], with its KL penalties."""
        earned_K = self.by_turn(self.rewards_N + self.penalties_N if penalised else self.rewards_N)
        return earned_K if self.untrained_K is None else earned_K + self.untrained_K


def estimates(
    traces: Sequence[Trace], scores: Sequence[Scores] | None, objective: Objective
) -> list[Estimate]:
    """Return what each trace is trained with. `scores` has one entry per trace if `objective.needs_scores`.

    Demonstrations are cloned: they take part in no comparison, and their advantages are 0.
    """
    groups: defaultdict[int, list[ScoredEpisode]] = defaultdict(list)
    for indices in by_episode(traces):
        first = traces[indices[0]]
        if not first.demo:
            picked = [scores[index] for index in indices] if scores else None
            groups[first.group].append(
                _played(indices, [traces[index] for index in indices], picked, objective)
            )
    made: dict[int, Estimate] = {}
    for episodes in groups.values():
        for episode, estimate in zip(
            episodes, _estimated(episodes, objective.advantage), strict=True
        ):
            made |= _by_trace(
                episode, estimate, [traces[index].trained_tokens for index in episode.indices]
            )
    if objective.advantage.kind in WHITENED:
        # Masked episodes carry no loss: were they counted, the tokens that are trained would not have mean 0.
        masks = objective.advantage.truncated == "mask"
        trained = [index for index in made if not (masks and traces[index].truncated)]
        made = _whitened(made, trained)
    return [
        made.get(index) or _untargeted(np.zeros(trace.trained_tokens))
        for index, trace in enumerate(traces)
    ]


def has_signal(returns: Sequence[Sequence[float]], settings: AdvantageSection) -> bool:
    """Return whether a group with these rewards, per episode and turn, has an advantage other than zero."""
    credits = [_credits(np.asarray(rewards), settings) for rewards in returns]
    values = [value for picked in credits for value in picked]
    if settings.kind == "return":
        return max(map(abs, values), default=0.0) > STD_FLOOR
    if settings.kind == "maxrl" and sum(values) <= STD_FLOOR * len(values):
        return False
    # Equal returns need not be equal in their last bits: they are sums of the same rewards in another order.
    if not settings.group_relative:
        return True
    # With credit by turn, a discount or a cost spreads the turns of each episode; equal episodes still teach nothing.
    first, *others = credits
    equal = all(
        len(picked) == len(first) and np.allclose(picked, first, rtol=0, atol=STD_FLOOR)
        for picked in others
    )
    return not equal and max(values) - min(values) > STD_FLOOR


WHITENED = ("reinforce_pp", "reinforce_pp_baseline", "gae", "vtrace")
"""Kinds whose advantages are scaled to mean 0 and variance 1 over the trained tokens of the batch."""


def _played(
    indices: Sequence[int],
    traces: Sequence[Trace],
    scores: Sequence[Scores] | None,
    objective: Objective,
) -> ScoredEpisode:
    """Join an episode's traces. The tokens of a turn stay together, because a turn stands in one branch."""
    masks = [trace.mask_L for trace in traces]
    places_N = np.concatenate(
        [trace.turns_L[mask_L] for trace, mask_L in zip(traces, masks, strict=True)]
    )
    order_N = np.argsort(places_N, kind="stable")

    def joined(columns: Sequence[NDArray[Any]]) -> Floats:
        return np.asarray(np.concatenate(columns).astype(np.float64)[order_N])

    mu_N = joined([trace.logprobs_L[mask_L] for trace, mask_L in zip(traces, masks, strict=True)])
    # Turns are counted from 0, so a −1 in front makes the first token begin one.
    begins_N = np.diff(places_N[order_N], prepend=-1) != 0
    zeros_N = np.zeros(len(mu_N))
    picked = Scores(zeros_N, zeros_N, zeros_N, zeros_N)
    if scores is not None:
        picked = Scores(
            *(joined([getattr(score, field.name) for score in scores]) for field in fields(Scores))
        )
    turns_N, untrained_K = np.cumsum(begins_N) - 1, None
    if traces[0].episode is not None:
        turns_N, untrained_K = (
            places_N[order_N].astype(np.int64),
            traces[0].rewards_K.astype(np.float64),
        )
        untrained_K[turns_N] = 0.0
    # μ and not π: the tokens are samples of μ, so that this estimates KL(μ ‖ π_ref).
    penalties_N = (
        -objective.reference.kl * (mu_N - picked.reference_N) if objective.penalised else zeros_N
    )
    return ScoredEpisode(
        indices=tuple(indices),
        order_N=order_N,
        rewards_N=joined(
            [trace.rewards_L[mask_L] for trace, mask_L in zip(traces, masks, strict=True)]
        ),
        penalties_N=penalties_N,
        turns_N=turns_N,
        first_J=np.flatnonzero(begins_N),
        untrained_K=untrained_K,
        mu_N=mu_N,
        scores=picked,
        states_K=traces[0].states
        or ("",) * (int(begins_N.sum()) if untrained_K is None else len(untrained_K)),
    )


def _by_trace(
    episode: ScoredEpisode, estimate: Estimate, tokens: Sequence[int]
) -> dict[int, Estimate]:
    """Give each trace of an episode, by its index, what its own tokens are trained with."""
    advantages_N, targets_N = np.empty(sum(tokens)), np.empty(sum(tokens))
    advantages_N[episode.order_N], targets_N[episode.order_N] = (
        estimate.advantages_N,
        estimate.targets_N,
    )
    ends = pairwise(np.cumsum([0, *tokens]))
    parts = [Estimate(advantages_N[start:end], targets_N[start:end]) for start, end in ends]
    return dict(zip(episode.indices, parts, strict=True))


def _estimated(group: Sequence[ScoredEpisode], settings: AdvantageSection) -> list[Estimate]:
    if settings.linear_only and any(episode.untrained_K is not None for episode in group):
        raise ValueError(
            f"advantage.kind {settings.kind} follows one token sequence, and an episode has several branches or turns "
            "without loss: choose another kind, or keep such groups out of the batch"
        )
    match settings:
        case GaeAdvantage():
            return [_gae(episode, settings) for episode in group]
        case VtraceAdvantage():
            return [_vtrace(episode, settings) for episode in group]
        case ReinforcePpAdvantage():
            return [_reinforce_pp(episode, settings.discount) for episode in group]
        case DpoAdvantage():
            return _dpo(group, settings.beta)
        case _ if settings.kind == "otb":
            return _otb(group, settings)
        case OwnAdvantage():
            return _compared(group, own_comparison(settings), settings)
        case _:
            return _compared(group, COMPARISONS[settings.kind], settings)


def _reinforce_pp(episode: ScoredEpisode, discount: float) -> Estimate:
    rewards_N = episode.rewards_N + episode.penalties_N
    return _untargeted(_ahead(episode, rewards_N, episode.rewards_by_turn(), discount))


def _compared(
    group: Sequence[ScoredEpisode], compare: Callable[[Floats], Floats], settings: AdvantageSection
) -> list[Estimate]:
    """Compare the returns of a group's episodes with one another; with credit by turn, all returns from a turn on.

    A penalty for the KL counts as reward. Only reinforce_pp_baseline keeps it out of the comparison, per token.
    """
    penalty_apart = settings.kind == "reinforce_pp_baseline"
    rewards = [episode.rewards_by_turn(penalised=not penalty_apart) for episode in group]
    credits = [_credits(rewards_K, settings) for rewards_K in rewards]
    # With credit by turn the comparison is over all turns of the group, so a longer episode counts more in the mean.
    compared_M, ends = compare(np.concatenate(credits)), np.cumsum([0, *map(len, credits)])
    discount = settings.discount if isinstance(settings, CreditedAdvantage) else 1.0
    state_weight = settings.state_weight if isinstance(settings, GrpoAdvantage) else 0.0
    beside = by_state(rewards, [episode.states_K for episode in group], compare, discount)
    made = []
    for episode, beside_K, (start, end) in zip(group, beside, pairwise(ends), strict=True):
        # One credit per episode, or one per turn.
        own_K = np.broadcast_to(compared_M[start:end], episode.turns)
        if state_weight:
            own_K = own_K + state_weight * beside_K
        own_N = own_K[episode.turns_N]
        if penalty_apart:
            penalties = episode.penalties_N
            own_N = own_N + _ahead(episode, penalties, episode.by_turn(penalties), discount)
        made.append(_untargeted(own_N))
    return made


def _otb(group: Sequence[ScoredEpisode], settings: AdvantageSection) -> list[Estimate]:
    credits = [
        np.broadcast_to(_credits(episode.rewards_by_turn(), settings), episode.turns)
        for episode in group
    ]
    returns = [
        credits_K[episode.turns_N] for credits_K, episode in zip(credits, group, strict=True)
    ]
    energies = [
        1.0 - 2.0 * np.exp(episode.scores.logprobs_N) + episode.scores.collisions_N
        for episode in group
    ]
    return [_untargeted(advantages_N) for advantages_N in optimal_token_baseline(returns, energies)]


def _credits(rewards_K: Floats, settings: AdvantageSection) -> Floats:
    """Return the episode's return as one value, or the return from each turn on."""
    if isinstance(settings, CreditedAdvantage) and settings.credit == "turn":
        return to_go(rewards_K, settings.discount)
    return np.asarray(rewards_K.sum(keepdims=True))


def _ahead(episode: ScoredEpisode, values_N: Floats, values_K: Floats, discount: float) -> Floats:
    """Return the sum of each token's own and later values, discounted by turn (REINFORCE++, arXiv 2501.03262)."""
    # γ is per turn: later tokens of the same turn count in full, and only the turns that follow are discounted.
    later_K = np.append(to_go(values_K, discount)[1:], 0.0) * discount
    ends_J = np.append(episode.first_J[1:], len(values_N))
    suffixes_N = to_go(values_N, 1.0)
    # At each token, what comes after its own turn.
    after_N = np.repeat(np.append(suffixes_N, 0.0)[ends_J], np.diff(ends_J, prepend=0))
    return np.asarray(suffixes_N - after_N + later_K[episode.turns_N])


def _gae(episode: ScoredEpisode, settings: GaeAdvantage) -> Estimate:
    rewards_N, values_N = episode.rewards_N + episode.penalties_N, episode.scores.values_N
    if settings.level == "token":
        advantages_N = gae(rewards_N, values_N, settings.discount, settings.trace_decay)
        return Estimate(advantages_N, advantages_N + values_N)
    # The value before a turn's first token is the one that has read everything but the turn itself.
    values_K = values_N[episode.first_J]
    advantages_K = gae(
        episode.by_turn(rewards_N), values_K, settings.discount, settings.trace_decay
    )
    return _by_turn(episode, advantages_K, advantages_K + values_K)


def _vtrace(episode: ScoredEpisode, settings: VtraceAdvantage) -> Estimate:
    """V-trace over turns, a turn's weight being the geometric mean of its tokens' π/μ."""
    tokens_K = np.diff(np.append(episode.first_J, len(episode.mu_N)))
    # The mean and not the product: over a long turn a product says little (1.1^100 is 13,780).
    ratios_K = np.exp(
        np.clip(episode.by_turn(episode.scores.logprobs_N - episode.mu_N) / tokens_K, -20.0, 20.0)
    )
    rewards_K = episode.by_turn(episode.rewards_N + episode.penalties_N)
    return _by_turn(
        episode, *vtrace(rewards_K, episode.scores.values_N[episode.first_J], ratios_K, settings)
    )


def _by_turn(episode: ScoredEpisode, advantages_K: Floats, targets_K: Floats) -> Estimate:
    """Spread a turn's advantage over its tokens; its target goes to its first, where the critic values the turn."""
    targets_N = np.full(len(episode.mu_N), np.nan)
    targets_N[episode.first_J] = targets_K
    return Estimate(advantages_K[episode.turns_N], targets_N)


def _dpo(group: Sequence[ScoredEpisode], beta: float) -> list[Estimate]:
    """Return ± β σ(−m) of each pair's tokens: with loss −A log π that is the gradient of DPO's −log σ(m).

    m = β (log π/π_ref of the better − log π/π_ref of the worse episode), arXiv 2305.18290, eq. 7. The best episode is
    paired with the worst, the second best with the second worst, and so on while their returns differ.
    """
    ranked = sorted(range(len(group)), key=lambda index: (-group[index].rewards_N.sum(), index))
    sides = [0.0] * len(group)
    # With an odd number of episodes the middle one has no partner, and keeps 0.
    for better, worse in zip(ranked[: len(group) // 2], reversed(ranked), strict=False):
        if group[better].rewards_N.sum() > group[worse].rewards_N.sum():
            gains = [
                (e.scores.logprobs_N - e.scores.reference_N).sum()
                for e in (group[better], group[worse])
            ]
            # At 50 the sigmoid is 1 to the last bit of a float64, and exp is far from its overflow.
            sides[better] = beta / (
                1.0 + np.exp(np.clip(beta * (gains[0] - gains[1]), -50.0, 50.0))
            )
            sides[worse] = -sides[better]
    return [
        _untargeted(np.full(len(episode.mu_N), side))
        for episode, side in zip(group, sides, strict=True)
    ]


def _whitened(made: Mapping[int, Estimate], trained: Sequence[int]) -> dict[int, Estimate]:
    """Scale the advantages to mean 0 and variance 1 over the trained tokens of the batch."""
    if not trained:
        return dict(made)
    tokens = np.concatenate([made[index].advantages_N for index in trained])
    mean, std = tokens.mean(), tokens.std() + STD_FLOOR
    # The targets keep the scale of the rewards: the critic predicts returns, whatever else is in the batch.
    return {
        index: Estimate((picked.advantages_N - mean) / std, picked.targets_N)
        for index, picked in made.items()
    }


def _untargeted(advantages_N: Floats) -> Estimate:
    return Estimate(advantages_N, np.full(len(advantages_N), np.nan))
