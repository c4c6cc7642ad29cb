"""Episodes of several branches: the advantages against plain loops over the records, and what a token counts.

The rule (docs/algorithms.md): the return is the episode's, the comparison is over episodes and not over token
sequences, and the advantage reaches the trained tokens of every branch.
"""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from horizonrl.common.config.objective import Objective, ReferenceSection
from horizonrl.common.types import Episode, Group
from horizonrl.learner.algorithm.advantage import Scores, estimates, has_signal
from horizonrl.learner.algorithm.batch import Batch, Trace, traces_of
from horizonrl.learner.engine.objective import build_updates, token_scales
from tests.learner.branching import branching_group, fan_out, straightened
from tests.learner.sections import make_advantage, make_loss
from tests.learner.traces import make_batch

KINDS = ["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "return"]
LINEAR_ONLY = ["gae", "vtrace", "dpo"]
OPTIONS: list[dict[str, Any]] = [
    *({"kind": kind} for kind in KINDS),
    # A config refuses it: it clones what earned.
    *({"kind": kind, "kl": 0.1} for kind in KINDS if kind != "return"),
    *(
        {"kind": kind, "credit": "turn", "discount": 0.9, "kl": kl}
        for kind in ("grpo", "dr_grpo", "reinforce_pp_baseline", "return")
        for kl in ((0.0,) if kind == "return" else (0.0, 0.1))
    ),
    {"kind": "reinforce_pp", "discount": 0.9, "kl": 0.1},
]
seeds = st.integers(0, 1 << 32)


def objective_of(kind: str, kl: float = 0.0, **options: Any) -> Objective:
    return Objective(
        advantage=make_advantage(kind=kind, **options),
        reference=ReferenceSection(kl=kl, estimator="k1_reward"),
    )


def traces_in(groups: list[Group]) -> list[Trace]:
    return [
        trace for g, group in enumerate(groups) for e in group.episodes for trace in traces_of(e, g)
    ]


def reference(group: int, episode: int, place: int, token: int) -> float:
    """The reference's logprob of a token, wherever the token stands in a batch."""
    return -1.0 - np.sin(1.0 + 7 * group + 3 * episode + 2 * place + token)


def scores_of(traces: list[Trace], episodes: list[tuple[int, int]]) -> list[Scores]:
    made = []
    for trace, (group, episode) in zip(traces, episodes, strict=True):
        places = trace.turns_L[trace.mask_L]
        tokens = [int((places[:n] == place).sum()) for n, place in enumerate(places)]
        own = [
            reference(group, episode, int(place), token)
            for place, token in zip(places, tokens, strict=True)
        ]
        zeros = np.zeros(len(own))
        made.append(Scores(zeros, np.array(own), zeros, zeros))
    return made


def owners(groups: list[Group]) -> list[tuple[int, int]]:
    """Return (group, episode) of each trace."""
    return [
        (g, e.index) for g, group in enumerate(groups) for e in group.episodes for _ in traces_of(e)
    ]


# ---- the oracle: plain loops over the turns of the records, in order of time


def oracle(groups: list[Group], objective: Objective) -> dict[tuple[int, int, int], list[float]]:
    """Return the advantages of each trained turn's tokens, by group, episode and the turn's place in the episode."""
    settings, beta = objective.advantage, objective.reference.kl
    gamma, made = getattr(settings, "discount", 1.0), dict[tuple[int, int, int], list[float]]()
    credit = getattr(settings, "credit", "episode")
    with_kl = settings.kind != "reinforce_pp_baseline"

    def penalties(g: int, episode: Episode, place: int) -> list[float]:
        turn = episode.turns[place]
        if not turn.trained:
            return [0.0] * len(turn.output_ids)
        return [
            -beta * (m - reference(g, episode.index, place, i)) for i, m in enumerate(turn.logprobs)
        ]

    def earned(g: int, episode: Episode, kl: bool) -> list[float]:
        return [
            turn.reward + kl * sum(penalties(g, episode, k)) for k, turn in enumerate(episode.turns)
        ]

    def ahead(values: list[float], start: int) -> float:
        return float(sum(gamma**j * value for j, value in enumerate(values[start:])))

    for g, group in enumerate(groups):
        pool = []
        for episode in group.episodes:
            rewards = earned(g, episode, with_kl)
            by_turn = credit == "turn"
            pool += [ahead(rewards, k) for k in range(len(rewards))] if by_turn else [sum(rewards)]
        mean, std = np.mean(pool), np.std(pool)
        for episode in group.episodes:
            rewards = earned(g, episode, with_kl)
            for k, turn in enumerate(episode.turns):
                if not turn.trained:
                    continue
                own = ahead(rewards, k) if credit == "turn" else sum(rewards)
                later = gamma * ahead(
                    [sum(penalties(g, episode, j)) for j in range(len(episode.turns))], k + 1
                )
                row = []
                for i in range(len(turn.output_ids)):
                    rest = sum(penalties(g, episode, k)[i:]) + later
                    row.append(
                        {
                            "grpo": (own - mean) / (std + 1e-6),
                            "dr_grpo": own - mean,
                            "rloo": own - (sum(pool) - own) / max(len(pool) - 1, 1),
                            "reinforce_pp_baseline": own - mean + rest,
                            "return": own,
                            "reinforce_pp": sum(penalties(g, episode, k)[i:])
                            + turn.reward
                            + gamma * ahead(earned(g, episode, True), k + 1),
                        }[settings.kind]
                    )
                made[g, episode.index, k] = [float(value) for value in row]
    if settings.kind.startswith("reinforce_pp"):
        flat = [value for row in made.values() for value in row]
        made = {
            key: [(value - np.mean(flat)) / (np.std(flat) + 1e-6) for value in row]
            for key, row in made.items()
        }
    return made


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@settings(max_examples=20)
@given(seed=seeds)
def test_every_kind_equals_the_oracle(options: dict[str, Any], seed: int) -> None:
    groups, objective = (
        [branching_group(seed), branching_group(seed + 1, group_size=2)],
        objective_of(**options),
    )
    traces, theirs = traces_in(groups), oracle(groups, objective)
    made = estimates(traces, scores_of(traces, owners(groups)), objective)
    for trace, mine, (g, e) in zip(traces, made, owners(groups), strict=True):
        places = dict.fromkeys(trace.turns_L[trace.mask_L].tolist())
        expected = [value for place in places for value in theirs[g, e, place]]
        assert_allclose(mine.advantages_N, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("options", [option for option in OPTIONS if not option.get("kl")], ids=str)
@settings(max_examples=20)
@given(seed=seeds)
def test_how_turns_are_spread_over_branches_changes_no_advantage(
    options: dict[str, Any], seed: int
) -> None:
    branched = branching_group(seed)
    trained = [
        turn.model_copy(update={"trained": True}) for e in branched.episodes for turn in e.turns
    ]
    turns = iter(trained)
    whole = [
        e.model_copy(update={"turns": tuple(next(turns) for _ in e.turns)})
        for e in branched.episodes
    ]
    objective = objective_of(**options)

    def by_turn(episodes: list[Episode]) -> dict[tuple[int, int], float]:
        traces = [(e.index, trace) for e in episodes for trace in traces_of(e)]
        made = estimates([trace for _, trace in traces], None, objective)
        return {
            (index, int(place)): float(value)
            for (index, trace), estimate in zip(traces, made, strict=True)
            for place, value in zip(trace.turns_L[trace.mask_L], estimate.advantages_N, strict=True)
        }

    straight = by_turn([straightened(e) for e in whole])
    assert by_turn(whole) == pytest.approx(straight, abs=1e-9)


# ---- by hand


@pytest.mark.parametrize("subagents", [(0, 0, 0, 0), (3, 1, 0, 2), (9, 9, 9, 0), (0, 0, 0, 9)])
def test_the_baseline_is_over_episodes_however_often_each_branches(
    subagents: tuple[int, ...],
) -> None:
    """Over rows it would move with the number of branches: 0.25 here for nine sub-agents of the failure alone."""
    episodes = [
        fan_out(i, reward, n)
        for i, (reward, n) in enumerate(zip((1, 1, 1, 0), subagents, strict=True))
    ]
    traces = [(e, trace) for e in episodes for trace in traces_of(e)]
    assert len(traces) == 4 + sum(subagents)
    made = estimates([trace for _, trace in traces], None, objective_of("dr_grpo"))
    for (episode, trace), estimate in zip(traces, made, strict=True):
        assert estimate.advantages_N.shape == (trace.trained_tokens,)
        assert (estimate.advantages_N == episode.episode_return - 0.75).all()


def test_the_reward_of_a_turn_without_loss_counts_in_the_return() -> None:
    episode = fan_out(0, 1.0, 1)
    paid = episode.turns[1].model_copy(update={"trained": False, "reward": 2.0})
    episodes = [
        episode.model_copy(update={"turns": (episode.turns[0], paid, episode.turns[2])}),
        fan_out(1, 0.0, 0),
    ]
    traces = [trace for e in episodes for trace in traces_of(e)]
    assert len(traces) == 2
    made = estimates(traces, None, objective_of("dr_grpo"))
    assert [estimate.advantages_N[0] for estimate in made] == [1.5, -1.5]
    by_turn = estimates(traces, None, objective_of("return", credit="turn"))[0].advantages_N
    assert by_turn[0] == 3.0 and by_turn[-1] == 1.0


@pytest.mark.parametrize("kind", LINEAR_ONLY)
def test_what_follows_one_sequence_refuses_several(kind: str) -> None:
    traces = traces_in([branching_group(1)])
    zeros = [Scores(*np.zeros((4, trace.trained_tokens))) for trace in traces]
    objective = objective_of("grpo").model_copy(update={"advantage": make_advantage(kind=kind)})
    with pytest.raises(ValueError, match=f"advantage.kind {kind} follows one token sequence"):
        estimates(traces, zeros, objective)
    assert objective.advantage.linear_only


@settings(max_examples=20)
@given(seeds)
def test_a_group_teaches_when_its_advantages_are_not_all_zero(seed: int) -> None:
    group = branching_group(seed)
    rewards = [[turn.reward for turn in episode.turns] for episode in group.episodes]
    made = estimates(traces_in([group]), None, objective_of("grpo"))
    assert has_signal(rewards, make_advantage()) == any(
        np.abs(e.advantages_N).max() > 1e-6 for e in made
    )


# ---- what a token counts


@pytest.mark.parametrize("normalisation", ["token", "sequence", "prompt", "constant"])
@settings(max_examples=20)
@given(seed=seeds)
def test_an_episode_weighs_the_same_however_often_it_branches(
    normalisation: str, seed: int
) -> None:
    groups = [branching_group(seed), branching_group(seed + 1, group_size=2)]
    traces, owner = traces_in(groups), owners(groups)
    masked_episodes = {key for index, key in enumerate(dict.fromkeys(owner)) if index % 3 == 0}
    masked = [key in masked_episodes for key in owner]
    scales = token_scales(traces, masked, make_loss(normalisation=normalisation), 50)
    kept = [(key, trace) for key, trace, out in zip(owner, traces, masked, strict=True) if not out]
    episodes = {key for key, _ in kept}
    for key, out, scale in zip(owner, masked, scales, strict=True):
        own = sum(trace.trained_tokens for other, trace in kept if other == key)
        group = sum(trace.trained_tokens for other, trace in kept if other[0] == key[0])
        definition = {
            "token": 1 / sum(trace.trained_tokens for _, trace in kept),
            "sequence": 1 / len(episodes) / max(own, 1),
            "prompt": 1 / len({g for g, _ in episodes}) / max(group, 1),
            "constant": 1 / len(episodes) / 50,
        }
        assert scale == (0.0 if out else pytest.approx(definition[normalisation]))


@settings(max_examples=20)
@given(seeds)
def test_a_minibatch_holds_all_branches_of_its_episodes(seed: int) -> None:
    groups = [branching_group(seed + n) for n in range(4)]
    traces = traces_in(groups)
    objective = Objective(loss=make_loss(minibatches=2))
    updates = build_updates(Batch(tuple(traces), 1), None, objective, 64)
    assert sum(map(len, updates)) == len(traces)
    held = [{sample.trace.group for sample in update} for update in updates]
    assert not held[0] & held[1]


def test_linear_and_branched_episodes_stand_in_one_batch() -> None:
    linear = make_batch(traces=2).traces
    branched = [trace for e in branching_group(3).episodes for trace in traces_of(e, 1)]
    made = estimates([*linear, *branched], None, objective_of("grpo"))
    alone = estimates(linear, None, objective_of("grpo"))
    for mine, theirs in zip(made[:2], alone, strict=True):
        assert (mine.advantages_N == theirs.advantages_N).all()
