"""The advantages against a second, slower implementation, by hand, and by their invariances."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from horizonrl.common.config.objective import Objective, ReferenceSection
from horizonrl.common.config.schema import RunConfig
from horizonrl.common.errors import ConfigError
from horizonrl.learner.algorithm.advantage import (
    COMPARISONS,
    WHITENED,
    Scores,
    estimates,
    gae,
    grpo,
    has_signal,
    maxrl,
    rloo,
    vtrace,
)
from horizonrl.learner.algorithm.batch import Trace
from tests.learner.sections import make_advantage

DPO = ["--advantage.kind=dpo", "--loss.kind=reinforce", "--correction.kind=none"]
NOT_DPO = [
    "loss.normalisation=sequence",
    "loss.normalisation=prompt",
    "advantage.truncated=mask",
    "correction.veto_band=[0.1,10]",
]
KINDS = [
    "grpo",
    "dr_grpo",
    "rloo",
    "maxrl",
    "otb",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "gae",
    "vtrace",
    "return",
]
UNPENALISED = ("maxrl", "return")
"""Which refuse a KL in the reward."""
TURN_CREDIT = ["grpo", "dr_grpo", "otb", "reinforce_pp_baseline", "return"]


def trace(turns: list[tuple[int, float]], group: int = 0, seed: int = 0, **facts: Any) -> Trace:
    """An episode of turns (tokens, reward), with a prompt before and an observation after each but the last."""
    rng, index, rewards = np.random.default_rng(seed), [-1, -1], [0.0, 0.0]
    for place, (tokens, reward) in enumerate(turns):
        index += [place] * tokens
        rewards += [0.0] * (tokens - 1) + [reward]
        if place + 1 < len(turns):
            index, rewards = [*index, -1], [*rewards, 0.0]
    turns_L = np.array(index, np.int32)
    return Trace(
        ids_L=np.zeros(len(index), np.int32),
        turns_L=turns_L,
        logprobs_L=np.where(turns_L >= 0, rng.uniform(-2, 0, len(index)), 0).astype(np.float32),
        versions_L=np.where(turns_L >= 0, 0, -1).astype(np.int32),
        rewards_L=np.array(rewards, np.float32),
        group=group,
        **facts,
    )


def scores_for(traces: list[Trace], seed: int = 0) -> list[Scores]:
    rng = np.random.default_rng(seed)
    return [
        Scores(*rng.normal(-1, 0.4, (3, t.trained_tokens)), rng.uniform(0, 1, t.trained_tokens))
        for t in traces
    ]


def objective_of(kind: str, kl: float = 0.0, **options: Any) -> Objective:
    if kind == "dpo":
        return RunConfig.load([], DPO).objective
    return Objective(
        advantage=make_advantage(kind=kind, **options),
        reference=ReferenceSection(kl=kl, estimator="k1_reward"),
    )


@st.composite
def batches(draw: st.DrawFn) -> list[Trace]:
    """Ragged groups of two to four episodes of one to four turns."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 20)))
    made = []
    for group in range(draw(st.integers(1, 3))):
        for _ in range(draw(st.integers(2, 4))):
            turns = [
                (int(rng.integers(1, 4)), float(rng.integers(-2, 3)))
                for _ in range(rng.integers(1, 5))
            ]
            made.append(trace(turns, group, int(rng.integers(1 << 20))))
    return made


# ---- the oracle: plain loops over (turn, token), as docs/algorithms.md writes it


def oracle(traces: list[Trace], scores: list[Scores], objective: Objective) -> list[list[float]]:
    settings: Any = objective.advantage
    beta = objective.reference.kl
    gamma, lam = getattr(settings, "discount", 1.0), getattr(settings, "trace_decay", 0.0)
    credit = getattr(settings, "credit", "episode")
    tokens, kls = [], []
    for t, s in zip(traces, scores, strict=True):
        index = np.flatnonzero(t.turns_L >= 0)
        tokens.append([(int(t.turns_L[i]), float(t.rewards_L[i])) for i in index])
        kls.append([float(t.logprobs_L[i]) - s.reference_N[n] for n, i in enumerate(index)])

    tokens_kls = [list(zip(*both, strict=True)) for both in zip(tokens, kls, strict=True)]

    def turn_rewards(e: int, with_kl: bool = True) -> list[float]:
        turns = max(k for k, _ in tokens[e]) + 1
        return [
            sum(
                r - with_kl * beta * kl
                for (k, r), kl in zip(tokens[e], kls[e], strict=True)
                if k == turn
            )
            for turn in range(turns)
        ]

    def ahead(rewards: list[float], start: int) -> float:
        return sum(gamma**j * r for j, r in enumerate(rewards[start:]))

    raw: list[list[float]] = []
    for e, t in enumerate(traces):
        siblings = [other for other in range(len(traces)) if traces[other].group == t.group]
        if settings.kind in COMPARISONS:
            with_kl = settings.kind != "reinforce_pp_baseline"
            if credit == "turn":
                pool = [
                    ahead(turn_rewards(o, with_kl), k)
                    for o in siblings
                    for k in range(len(turn_rewards(o)))
                ]
                mine = [ahead(turn_rewards(e, with_kl), k) for k, _ in tokens[e]]
            else:
                pool = [sum(turn_rewards(o, with_kl)) for o in siblings]
                mine = [sum(turn_rewards(e, with_kl))] * len(tokens[e])
            mean, std = np.mean(pool), np.std(pool)
            row = {
                "grpo": [(R - mean) / (std + 1e-6) for R in mine],
                "dr_grpo": [R - mean for R in mine],
                "reinforce_pp_baseline": [
                    R
                    - mean
                    - beta
                    * sum(gamma ** (j - tokens[e][n][0]) * kl for (j, _), kl in tokens_kls[e][n:])
                    for n, R in enumerate(mine)
                ],
                "rloo": [R - (sum(pool) - R) / (len(pool) - 1) for R in mine],
                "maxrl": [(R - mean) / mean if mean > 1e-6 else 0.0 for R in mine],
                "return": mine,
            }[settings.kind]
        elif settings.kind == "otb":
            gained, paths = {}, {}
            for o in siblings:
                whole = credit == "episode"
                gained[o] = [
                    sum(turn_rewards(o)) if whole else ahead(turn_rewards(o), k)
                    for k, _ in tokens[o]
                ]
                pi, squares = np.exp(scores[o].logprobs_N), scores[o].collisions_N
                paths[o] = [
                    sum(max(0, 1 - 2 * pi[j] + squares[j]) for j in range(n + 1))
                    for n in range(len(pi))
                ]
            row = []
            for n in range(len(tokens[e])):
                there = [o for o in siblings if len(tokens[o]) > n]
                weight = sum(paths[o][n] + 1e-4 for o in there)
                row.append(
                    gained[e][n] - sum(gained[o][n] * (paths[o][n] + 1e-4) for o in there) / weight
                )
        elif settings.kind == "reinforce_pp":
            row = [
                sum(
                    gamma ** (j - k) * (r - beta * kl)
                    for (j, r), kl in list(zip(tokens[e], kls[e], strict=True))[n:]
                )
                for n, (k, _) in enumerate(tokens[e])
            ]
        elif settings.kind == "gae" and settings.level == "token":
            V = [*scores[e].values_N, 0.0]
            deltas = [
                r - beta * kl + gamma * V[n + 1] - V[n]
                for n, ((_, r), kl) in enumerate(zip(tokens[e], kls[e], strict=True))
            ]
            row = [
                sum((gamma * lam) ** m * d for m, d in enumerate(deltas[n:]))
                for n in range(len(deltas))
            ]
        else:
            firsts = [
                min(n for n, (k, _) in enumerate(tokens[e]) if k == turn)
                for turn in range(tokens[e][-1][0] + 1)
            ]
            V, R = [*(scores[e].values_N[n] for n in firsts), 0.0], turn_rewards(e)
            deltas = [R[k] + gamma * V[k + 1] - V[k] for k in range(len(R))]
            if settings.kind == "gae":
                by_turn = [
                    sum((gamma * lam) ** m * d for m, d in enumerate(deltas[k:]))
                    for k in range(len(R))
                ]
            else:
                index = np.flatnonzero(t.turns_L >= 0)
                logs = scores[e].logprobs_N - t.logprobs_L[index]
                w = [
                    math.exp(np.mean([logs[n] for n, (k, _) in enumerate(tokens[e]) if k == turn]))
                    for turn in range(len(R))
                ]
                rho = [min(1.0, x) for x in w]
                v = [
                    V[k] + sum(
                        gamma ** (j - k) * math.prod(lam * rho[i] for i in range(k, j)) * rho[j] * deltas[j]
                        for j in range(k, len(R))
                    )
                    for k in range(len(R))
                ]  # fmt: skip
                by_turn = [R[k] + gamma * [*v, 0.0][k + 1] - V[k] for k in range(len(R))]
            row = [by_turn[k] for k, _ in tokens[e]]
        raw.append([float(x) for x in row])
    if settings.kind in ("reinforce_pp", "reinforce_pp_baseline", "gae", "vtrace"):
        left_out = settings.truncated == "mask"
        flat = [
            x
            for t, row in zip(traces, raw, strict=True)
            for x in row
            if not (left_out and t.truncated)
        ] or [0.0]
        raw = [[(x - np.mean(flat)) / (np.std(flat) + 1e-6) for x in row] for row in raw]
    return raw


@pytest.mark.parametrize(
    "options",
    [
        *({"kind": kind} for kind in KINDS),
        *({"kind": kind, "kl": 0.1} for kind in KINDS if kind not in UNPENALISED),
        *({"kind": kind, "credit": "turn", "discount": 0.9} for kind in TURN_CREDIT),
        {"kind": "gae", "level": "token", "discount": 0.95, "kl": 0.1},
        {"kind": "gae", "discount": 0.9, "trace_decay": 0.7},
        {"kind": "vtrace", "discount": 0.9, "trace_decay": 0.8, "kl": 0.1},
        {"kind": "reinforce_pp", "discount": 0.9, "kl": 0.1},
        {"kind": "reinforce_pp_baseline", "credit": "turn", "discount": 0.9, "kl": 0.1},
    ],
    ids=str,
)
@given(traces=batches(), seed=st.integers(0, 1 << 20))
def test_every_kind_equals_the_oracle(
    options: dict[str, Any], traces: list[Trace], seed: int
) -> None:
    objective, scores = objective_of(**options), scores_for(traces, seed)
    made = estimates(traces, scores, objective)
    for mine, theirs in zip(made, oracle(traces, scores, objective), strict=True):
        assert_allclose(mine.advantages_N, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", WHITENED)
@given(traces=batches(), seed=st.integers(0, 1 << 20))
def test_what_is_trained_is_whitened_without_the_episodes_that_are_masked(
    kind: str, traces: list[Trace], seed: int
) -> None:
    draws = np.random.default_rng(seed).random(len(traces))
    cut = [replace(t, truncated=bool(draw < 0.4)) for t, draw in zip(traces, draws, strict=True)]
    objective, scores = objective_of(kind, truncated="mask"), scores_for(cut, seed)
    kept = [index for index, t in enumerate(cut) if not t.truncated]
    made, theirs = estimates(cut, scores, objective), oracle(cut, scores, objective)
    for index in kept:
        assert_allclose(made[index].advantages_N, theirs[index], rtol=1e-6, atol=1e-6)
    if kept:
        assert abs(np.concatenate([made[index].advantages_N for index in kept]).mean()) < 1e-6


# ---- by hand


def test_comparisons_by_hand() -> None:
    assert_allclose(grpo(np.array([1.0, 0.0, 0.0, 1.0])), [1, -1, -1, 1], rtol=1e-5)
    assert_allclose(rloo(np.array([6.0, 1.0, 2.0])), [4.5, -3, -1.5])


def test_maxrl_has_the_gradient_of_the_log_of_the_chance_of_success() -> None:
    """Over k successes of n: ∇ log p̂ = Σ r ∇ log π / (n p̂), less the baseline (arXiv 2602.02710)."""
    assert_allclose(maxrl(np.array([1.0, 0.0, 0.0, 0.0])), [3, -1, -1, -1])
    assert_allclose(maxrl(np.array([1.0, 1.0, 1.0, 0.0])), np.array([1, 1, 1, -3]) / 3)
    assert not maxrl(np.array([-1.0, -2.0])).any() and not has_signal(
        [[-1.0], [-2.0]], make_advantage(kind="maxrl")
    )


@given(
    drawn=st.lists(
        st.lists(
            st.tuples(st.sampled_from(["", "a", "b", "c"]), st.floats(-2, 2)),
            min_size=1,
            max_size=5,
        ),
        min_size=2,
        max_size=4,
    ),
    kind=st.sampled_from(["grpo", "dr_grpo"]),
)
def test_gigpo_compares_turns_within_their_state(
    drawn: list[list[tuple[str, float]]], kind: str
) -> None:
    gamma, omega = 0.9, 0.7
    traces = [
        replace(
            trace([(2, reward) for _, reward in turns], seed=e),
            states=tuple(state for state, _ in turns),
        )
        for e, turns in enumerate(drawn)
    ]
    whole, both = (
        estimates(traces, None, objective_of(kind, state_weight=weight, discount=gamma))
        for weight in (1e-12, omega)
    )
    ahead = [
        [(state, sum(gamma**j * float(np.float32(r)) for j, (_, r) in enumerate(turns[k:])))
         for k, (state, _) in enumerate(turns)]
        for turns in drawn
    ]  # fmt: skip
    for e, turns in enumerate(ahead):
        expected = []
        for state, value in turns:
            pool = [other for each in ahead for same, other in each if same == state]
            alone = not state or len(pool) == 1
            scale = np.std(pool) + 1e-6 if kind == "grpo" else 1.0
            expected += [0.0 if alone else omega * (value - np.mean(pool)) / scale] * 2
        assert_allclose(
            both[e].advantages_N - whole[e].advantages_N, expected, rtol=1e-5, atol=1e-5
        )


def test_gae_between_its_two_ends() -> None:
    rewards, values = np.array([0.0, 0.0, 1.0]), np.array([0.5, 0.2, 0.6])
    # The return less the critic's word.
    assert_allclose(gae(rewards, values, 1.0, 1.0), 1.0 - values)
    # One step of temporal difference.
    assert_allclose(gae(rewards, values, 1.0, 0.0), [-0.3, 0.4, 0.4])


def test_on_policy_vtrace_targets_are_the_returns() -> None:
    rewards, values = np.array([0.0, 0.5, 1.0]), np.array([0.5, 0.2, 0.6])
    settings = make_advantage(kind="vtrace", trace_decay=1.0)
    advantages, targets = vtrace(rewards, values, np.ones(3), settings)
    assert_allclose(targets, [1.5, 1.5, 1.0])
    assert_allclose(advantages, targets - values)


def test_a_turn_that_the_policy_would_not_take_teaches_vtrace_nothing_of_what_came_after() -> None:
    values = np.array([0.5, 0.2, 0.6])
    _, targets = vtrace(
        np.array([0.0, 0.0, 1.0]), values, np.array([0.0, 1.0, 1.0]), make_advantage(kind="vtrace")
    )
    assert targets[0] == values[0] and targets[2] == 1.0


def test_dpo_pairs_the_best_with_the_worst() -> None:
    traces = [trace([(2, reward)]) for reward in (1.0, 0.0, 0.5, 0.5)]
    zeros = np.zeros(2)
    scores = [Scores(zeros, zeros, zeros, zeros)] * 4
    made = estimates(traces, scores, objective_of("dpo"))
    # Β σ(0), and equals teach nothing.
    assert [m.advantages_N[0] for m in made] == [0.25, -0.25, 0.0, 0.0]


@given(batches(), st.integers(0, 1 << 20))
def test_dpo_has_the_gradient_of_its_loss(traces: list[Trace], seed: int) -> None:
    traces = [replace(t, group=0) for t in traces]
    scores, beta, step = scores_for(traces, seed), 0.5, 1e-6

    def loss(moved: int, by: float) -> float:
        returns = [t.rewards_L.sum() for t in traces]
        ranked = sorted(range(len(traces)), key=lambda e: (-returns[e], e))
        gain = [
            (s.logprobs_N - s.reference_N).sum() + by * (e == moved) for e, s in enumerate(scores)
        ]
        pairs = [(ranked[i], ranked[-1 - i]) for i in range(len(ranked) // 2)]
        return sum(
            math.log1p(math.exp(-beta * (gain[b] - gain[w])))
            for b, w in pairs
            if returns[b] > returns[w]
        )

    for e, made in enumerate(estimates(traces, scores, objective_of("dpo"))):
        slope = (loss(e, step) - loss(e, -step)) / (2 * step)
        assert_allclose(-made.advantages_N, slope, atol=1e-6)  # of each token's log π


# ---- invariances


@pytest.mark.parametrize("kind", [*KINDS, "dpo"])
def test_a_terminal_reward_reaches_every_generated_token(kind: str) -> None:
    traces = [
        trace([(2, 0.0), (3, 0.0), (1, reward)], seed=index)
        for index, reward in enumerate((1.0, 0.0))
    ]
    zeros = np.zeros(6)
    quiet = [Scores(t.logprobs_L[t.mask_L].astype(np.float64), zeros, zeros, zeros) for t in traces]
    objective = objective_of(kind, **({"trace_decay": 1.0} if kind in ("gae", "vtrace") else {}))
    rewarded, unrewarded = (e.advantages_N for e in estimates(traces, quiet, objective))
    assert (rewarded > unrewarded).all()
    assert rewarded.size == 6


@pytest.mark.parametrize("kind", KINDS)
@given(traces=batches(), seed=st.integers(0, 1000))
def test_the_order_of_the_episodes_changes_nothing(
    kind: str, traces: list[Trace], seed: int
) -> None:
    scores, order = scores_for(traces), np.random.default_rng(seed).permutation(len(traces))
    kl = 0.0 if kind in UNPENALISED else 0.1
    made = estimates(traces, scores, objective_of(kind, kl=kl))
    moved = estimates(
        [traces[index] for index in order],
        [scores[index] for index in order],
        objective_of(kind, kl=kl),
    )
    for index, theirs in zip(order, moved, strict=True):
        assert_allclose(theirs.advantages_N, made[index].advantages_N, atol=1e-9)


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if not make_advantage(kind=kind).group_relative]
)
@given(traces=batches())
def test_what_compares_no_siblings_needs_none(kind: str, traces: list[Trace]) -> None:
    alone = [replace(trace, group=index) for index, trace in enumerate(traces)]
    scores = scores_for(traces)
    made, split = (estimates(batch, scores, objective_of(kind)) for batch in (traces, alone))
    for ours, theirs in zip(made, split, strict=True):
        assert_allclose(theirs.advantages_N, ours.advantages_N)
        assert_allclose(theirs.targets_N, ours.targets_N)


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo"])
@given(
    returns=st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=16),
    shift=st.floats(-10, 10),
)
def test_comparisons_sum_to_zero_and_ignore_a_shift(
    kind: str, returns: list[float], shift: float
) -> None:
    compared = COMPARISONS[kind](np.array(returns))
    assert_allclose(compared.sum(), 0, atol=1e-6 * (1 + np.abs(compared).max()))
    if np.std(returns) > 1e-2:
        assert_allclose(
            COMPARISONS[kind](np.array(returns) + shift), compared, rtol=1e-6, atol=1e-6
        )


@pytest.mark.parametrize("kind", KINDS)
def test_demonstrations_stand_in_no_comparison(kind: str) -> None:
    played = [trace([(2, 1.0)]), trace([(3, 0.0)])]
    mixed = [played[0], trace([(4, 1.0)], group=1, demo=True), played[1]]
    alone, beside = (
        estimates(traces, scores_for(traces, 1)[:1] * 0 or None, objective_of(kind))
        for traces in (played, mixed)
    )
    assert_allclose(beside[0].advantages_N, alone[0].advantages_N)
    assert not beside[1].advantages_N.any() and np.isnan(beside[1].targets_N).all()


@given(batches())
def test_a_group_teaches_when_its_advantages_are_not_all_zero(traces: list[Trace]) -> None:
    for kind in ("grpo", "rloo", "maxrl", "return"):
        for group in {t.group for t in traces}:
            own = [t for t in traces if t.group == group]
            rewards = [t.rewards_L[t.rewards_L != 0].astype(float).tolist() or [0.0] for t in own]
            made = estimates(own, None, objective_of(kind))
            assert has_signal(rewards, make_advantage(kind=kind)) == any(
                np.abs(e.advantages_N).max() > 1e-6 for e in made
            )  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["grpo", "dpo", "return"])
def test_the_same_return_in_other_increments_is_no_variance(kind: str) -> None:
    apart = [0.1 + 0.2 - 0.3], [0.0]
    assert apart[0] != apart[1]
    assert not has_signal(apart, make_advantage(kind=kind))
    assert not has_signal([[0.1, 0.2, 0.3], [0.3, 0.2, 0.1]], make_advantage())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["--advantage.kind=rloo", "--advantage.credit=turn"],
            r"no such key of advantage\.kind rloo",
        ),
        (["--advantage.discount=0.9"], r"set advantage\.credit to turn"),
        (["--advantage.kind=dpo"], r"set loss\.kind to reinforce"),
        *(([*DPO, f"--{key}"], r"DPO's loss") for key in NOT_DPO),
        (["--advantage.kind=gaae"], r"advantage\.kind"),
    ],
)
def test_a_combination_that_makes_no_sense_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RunConfig.load([], overrides)
