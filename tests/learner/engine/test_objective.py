"""The objective as a whole: its gradient does not depend on how a batch is laid out."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from numpy.typing import NDArray
from torch import Tensor

from horizonrl.common.config.objective import Objective, ReferenceSection
from horizonrl.learner.algorithm.advantage import Scores, estimates
from horizonrl.learner.algorithm.batch import Batch
from horizonrl.learner.engine.model.model import ScorerOutput, TokenScorer, load_language_model
from horizonrl.learner.engine.model.packing import pack
from horizonrl.learner.engine.objective import (
    LossStats,
    build_updates,
    loss_inputs,
    loss_stats,
    scored_together,
    token_loss,
    token_scales,
)
from tests.learner.knowns import known
from tests.learner.sections import make_advantage, make_correction, make_loss
from tests.learner.traces import make_batch, make_groups

OBJECTIVES = {
    "ppo": Objective(),
    "gspo, KL, entropy": Objective(
        loss=make_loss(kind="gspo", entropy=0.01, normalisation="sequence"),
        reference=ReferenceSection(kl=0.1),
    ),
    "gae": Objective(advantage=make_advantage(kind="gae")),
    "reinforce, turns": Objective(
        advantage=make_advantage(credit="turn", discount=0.9),
        loss=make_loss(kind="reinforce", normalisation="prompt"),
    ),
    "decoupled": Objective(loss=make_loss(kind="decoupled_ppo", normalisation="constant")),
}


def scores_for(batch: Batch) -> list[Scores]:
    """Scores that belong to the trace, wherever it stands."""
    draws = [np.random.default_rng(int(trace.ids_L.sum())) for trace in batch.traces]
    return [
        Scores(*draw.normal(-6, 0.3, (4, t.trained_tokens)))
        for draw, t in zip(draws, batch.traces, strict=True)
    ]


def gradient(
    scorer: TokenScorer,
    batch: Batch,
    objective: Objective,
    ranks: int = 1,
    budget: int = 2000,
    flat: bool = True,
) -> Tensor:
    scorer.zero_grad()
    (update,) = build_updates(batch, scores_for(batch), objective, 64)
    for plan in pack([sample.trace for sample in update], ranks, budget, flat):
        for mb in plan:
            asked = (mb.ids_T, mb.positions_T, mb.segments_S4, mb.trained_N)
            output = ScorerOutput(*scorer(*map(torch.from_numpy, asked)))
            token_loss(
                output, loss_inputs(update, mb, batch.version, torch.device("cpu")), objective
            ).sum().backward()
    return torch.cat([p.grad.flatten() for p in scorer.parameters() if p.grad is not None])


@pytest.fixture(scope="module")
def scorer(tiny_model: Path) -> TokenScorer:
    lm: Any = load_language_model(tiny_model)
    torch.manual_seed(0)
    return TokenScorer(lm.float(), critic=True).float()


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
def test_the_gradient_in_float32_is_the_same_for_every_layout(
    scorer: TokenScorer, objective: Objective
) -> None:
    batch = make_groups(0, groups=3, group_size=4, prompt=60)
    whole = gradient(scorer, batch, objective)
    order = np.random.default_rng(0).permutation(len(batch.traces))
    moved = replace(batch, traces=tuple(batch.traces[index] for index in order))
    for other in (
        gradient(scorer, batch, objective, budget=200),
        gradient(scorer, batch, objective, flat=False),
        gradient(scorer, batch, objective, ranks=3, budget=400),
        gradient(scorer, moved, objective, budget=500),
    ):
        assert float((other - whole).norm() / whole.norm()) < 2e-6
        assert float((other - whole).abs().max()) < 1e-6


def test_what_stands_at_observation_tokens_gives_no_gradient(scorer: TokenScorer) -> None:
    batch = make_batch(3)
    noisy = tuple(
        replace(
            trace,
            logprobs_L=np.where(trace.mask_L, trace.logprobs_L, np.float32(-9)),
            versions_L=np.where(trace.mask_L, trace.versions_L, 9).astype(np.int32),
            rewards_L=np.where(trace.mask_L, trace.rewards_L, np.float32(9)),
        )
        for trace in batch.traces
    )
    mine, theirs = (
        gradient(scorer, each, Objective()) for each in (batch, replace(batch, traces=noisy))
    )
    assert torch.equal(mine, theirs)


@pytest.mark.parametrize("normalisation", ["token", "sequence", "prompt", "constant"])
@given(seed=st.integers(0, 1000))
def test_what_a_token_counts_equals_its_definition(normalisation: str, seed: int) -> None:
    traces = make_batch(seed, traces=7).traces
    masked = [index % 3 == 0 for index in range(7)]
    scales = token_scales(traces, masked, make_loss(normalisation=normalisation), 50)
    kept = [trace for trace, out in zip(traces, masked, strict=True) if not out]
    for trace, out, scale in zip(traces, masked, scales, strict=True):
        group = sum(t.trained_tokens for t in kept if t.group == trace.group)
        definition = {
            "token": 1 / sum(t.trained_tokens for t in kept),
            "sequence": 1 / len(kept) / trace.trained_tokens,
            "prompt": 1 / len({t.group for t in kept}) / max(group, 1),
            "constant": 1 / len(kept) / 50,
        }
        assert scale == (0.0 if out else pytest.approx(definition[normalisation]))


@pytest.mark.parametrize(
    ("kind", "counted_by"), [("gspo", "sequence"), ("ppo", "token"), ("reinforce", "token")]
)
def test_the_default_normalisation_follows_the_loss(kind: str, counted_by: str) -> None:
    assert make_loss(kind=kind).counted_by == counted_by
    assert make_loss(kind=kind, normalisation="prompt").counted_by == "prompt"


def ess_lr_scale(log_ratio_BT: NDArray[np.float64], parts: int = 1, **columns: Tensor) -> float:
    """Return what `ess_lr` scales the rate of an update by, tallied in so many micro-batches."""
    rows = []
    for logs_BT in np.split(log_ratio_BT, parts):
        logs_N = torch.from_numpy(logs_BT.ravel())
        nothing_N, episodes_N = (
            torch.zeros_like(logs_N),
            torch.arange(len(logs_BT)).repeat_interleave(logs_BT.shape[1]),
        )
        own = {name: column.repeat_interleave(logs_BT.shape[1]) for name, column in columns.items()}
        tokens_known = known(nothing_N, nothing_N, episodes_N * 0, episodes_N, **own)
        output = ScorerOutput(logs_N, nothing_N, nothing_N, nothing_N)
        rows.append(loss_stats(nothing_N, output, tokens_known, Objective()))
    return math.sqrt(LossStats.total(rows).ess_of_episodes)


def test_the_effective_sample_size_of_ess_lr_is_of_whole_episodes() -> None:
    log_ratio_BT = np.random.default_rng(0).normal(0, 0.05, (64, 500))
    weights_B = np.exp(log_ratio_BT.sum(1))
    oracle = math.sqrt(weights_B.sum() ** 2 / (64 * (weights_B**2).sum()))
    assert oracle == pytest.approx(0.601, abs=1e-3)  # of the tokens it is 0.999
    for parts in (1, 8):
        assert ess_lr_scale(log_ratio_BT, parts) == pytest.approx(oracle, rel=1e-6)
    # All alike, however far away.
    assert ess_lr_scale(np.full((4, 500), -0.2)) == pytest.approx(1.0)
    # Alike but for one, whose Π r of e^-600 is the largest by far: one episode of sixteen is all that is left.
    apart = np.full((16, 10_000), -0.1)
    apart[3] = -0.06
    for parts in (1, 16):
        assert ess_lr_scale(apart, parts) == pytest.approx(0.25)


def test_episodes_that_are_cloned_or_masked_do_not_lower_the_rate() -> None:
    log_ratio_BT = np.repeat([[0.0], [0.0], [3.0], [-3.0]], 5, axis=1)
    out = {
        "demo_N": torch.tensor([False, False, True, False]),
        "scales_N": torch.tensor([1.0, 1.0, 1.0, 0.0]),
    }
    assert ess_lr_scale(log_ratio_BT, **out) == pytest.approx(1.0)
    assert ess_lr_scale(log_ratio_BT) < 0.6


def test_dpo_is_its_losss_gradient_only_where_all_tokens_count_the_same() -> None:
    """Which is why the other normalisations are refused: over the logprobs of all tokens, the cosine to DPO's own."""
    batch = make_batch(1, traces=8, longest=200)
    dpo = Objective(
        advantage=make_advantage(kind="dpo"),
        loss=make_loss(kind="reinforce"),
        correction=make_correction(kind=None),
    )
    pulls = [estimate.advantages_N for estimate in estimates(batch.traces, scores_for(batch), dpo)]
    cosines = {}
    for normalisation in ("token", "constant", "sequence", "prompt"):
        scales = token_scales(
            batch.traces, [False] * 8, make_loss(normalisation=normalisation), 200
        )
        ours, theirs = (
            np.concatenate([s * p for s, p in zip(scales, pulls, strict=True)]),
            np.concatenate(pulls),
        )
        cosines[normalisation] = ours @ theirs / np.linalg.norm(ours) / np.linalg.norm(theirs)
    assert min(cosines["token"], cosines["constant"]) == pytest.approx(1.0)
    assert max(cosines["sequence"], cosines["prompt"]) < 0.98


def test_a_cut_episode_that_is_masked_stands_in_the_baseline_but_is_not_trained() -> None:
    batch = make_groups(0, groups=1, group_size=3, prompt=4)
    cut = replace(batch, traces=(replace(batch.traces[0], truncated=True), *batch.traces[1:]))
    masking, keeping = (
        Objective(advantage=make_advantage(truncated=how)) for how in ("mask", "keep")
    )
    (update,), (whole,) = (
        build_updates(cut, None, masking, 64),
        build_updates(cut, None, keeping, 64),
    )
    assert [sample.scale > 0 for sample in update] == [False, True, True]
    for one, other in zip(update, whole, strict=True):
        assert_allclose(one.estimate.advantages_N, other.estimate.advantages_N)


@given(seed=st.integers(0, 1000), minibatches=st.integers(1, 5), epochs=st.integers(1, 3))
def test_an_epoch_trains_every_trace_once_and_no_group_is_cut(
    seed: int, minibatches: int, epochs: int
) -> None:
    batch = make_batch(seed, traces=8)
    updates = build_updates(
        batch, None, Objective(loss=make_loss(minibatches=minibatches, epochs=epochs)), 64
    )
    assert len(updates) == min(minibatches, 4) * epochs
    trained = [id(sample.trace) for update in updates for sample in update]
    assert sorted(trained) == sorted([id(trace) for trace in batch.traces] * epochs)
    for update in updates[: len(updates) // epochs]:
        groups = {sample.trace.group for sample in update}
        assert all(
            (trace.group in groups) == any(sample.trace is trace for sample in update)
            for trace in batch.traces
        )


@given(seed=st.integers(0, 1000), version=st.integers(0, 50))
def test_a_shuffled_epoch_is_a_partition_of_its_own_that_follows_from_seed_and_version(
    seed: int, version: int
) -> None:
    objective = Objective(loss=make_loss(minibatches=3, epochs=2, shuffle=True))
    batch = replace(make_groups(0, groups=9, group_size=2, prompt=4), version=version)
    numbered = tuple(replace(trace, group=index // 2) for index, trace in enumerate(batch.traces))
    batch = replace(batch, traces=numbered)

    def groups(seed: int) -> list[set[int]]:
        return [
            {s.trace.group for s in update}
            for update in build_updates(batch, None, objective, 64, seed)
        ]

    made = groups(seed)
    assert made == groups(seed)
    for epoch in (made[:3], made[3:]):
        assert sorted(group for part in epoch for group in part) == list(range(9))
    assert any(groups(seed + other) != made for other in range(1, 4))


@pytest.mark.parametrize("keys", [{}, {"minibatches": 3, "epochs": 2, "shuffle": True}])
def test_gspo_is_scored_in_the_company_in_which_it_is_first_trained(keys: dict[str, Any]) -> None:
    """In bfloat16 a token's logprob depends on what it is packed with, by more than GSPO's band."""
    batch = make_batch(traces=12)

    def packed(kind: str) -> tuple[list[list[int]], list[list[int]]]:
        objective = Objective(loss=make_loss(kind=kind, **keys))
        updates = build_updates(batch, scores_for(batch), objective, 64, seed=3)
        trained = [[id(sample.trace) for sample in update] for update in updates]
        scored = [
            [id(batch.traces[index]) for index in together]
            for together in scored_together(batch, objective, seed=3)
        ]
        return scored, trained[: keys.get("minibatches", 1)]

    scored, trained = packed("gspo")
    assert scored == trained
    assert packed("ppo")[0] == [[id(trace) for trace in batch.traces]]


def test_while_the_critic_warms_up_the_policy_has_no_gradient() -> None:
    logprobs_N, values_N = torch.tensor(
        [[-1.0, -2.0], [0.3, -0.1]], dtype=torch.float64
    ).requires_grad_()
    nothing_N, first_N = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.int64)
    inputs = known(nothing_N - 1.5, nothing_N + 0.7, first_N, first_N, targets_N=nothing_N + 1.0)
    output = ScorerOutput(logprobs_N, nothing_N, values_N, nothing_N)
    gae = Objective(advantage=make_advantage(kind="gae"))
    whole, alone = (
        token_loss(output, inputs, gae, critic_alone=alone).sum() for alone in (False, True)
    )
    policy_N, critic_N = torch.autograd.grad(alone, [logprobs_N, values_N], retain_graph=True)
    assert policy_N.tolist() == [0.0, 0.0]
    assert (
        torch.equal(critic_N, torch.autograd.grad(whole, [values_N], retain_graph=True)[0])
        and critic_N.all()
    )
    assert torch.autograd.grad(whole, [logprobs_N])[0].any()
