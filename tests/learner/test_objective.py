"""The objective as a whole: its gradient does not depend on how a batch is laid out."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from torch import Tensor

from horizonrl.common.objective import AdvantageSection, LossSection, Objective, ReferenceSection
from horizonrl.learner.advantage import Scores
from horizonrl.learner.batch import Batch
from horizonrl.learner.model import Said, TokenScorer, load_language_model
from horizonrl.learner.objective import known_of, lessons, token_loss, token_scales
from horizonrl.learner.packing import pack
from tests.learner.traces import make_batch, make_groups

OBJECTIVES = {
    "ppo": Objective(),
    "gspo, KL, entropy": Objective(
        loss=LossSection(kind="gspo", entropy=0.01, normalisation="sequence"), reference=ReferenceSection(kl=0.1)
    ),
    "gae": Objective(advantage=AdvantageSection(kind="gae")),
    "reinforce, turns": Objective(
        advantage=AdvantageSection(credit="turn", discount=0.9),
        loss=LossSection(kind="reinforce", normalisation="prompt"),
    ),
    "decoupled": Objective(loss=LossSection(kind="decoupled_ppo", normalisation="constant")),
}


def scores_for(batch: Batch) -> list[Scores]:
    """Scores that belong to the trace, wherever it stands."""
    draws = [np.random.default_rng(int(trace.ids_L.sum())) for trace in batch.traces]
    return [Scores(*draw.normal(-6, 0.3, (3, t.trained_tokens))) for draw, t in zip(draws, batch.traces, strict=True)]


def gradient(
    scorer: TokenScorer, batch: Batch, objective: Objective, ranks: int = 1, budget: int = 2000, share: bool = True
) -> Tensor:
    scorer.zero_grad()
    (update,) = lessons(batch, scores_for(batch), objective, 64)
    for plan in pack([lesson.trace for lesson in update], ranks, budget, share):
        for mb in plan:
            said = Said(*scorer(*map(torch.from_numpy, (mb.prefix_P, mb.ids_BT, mb.trained_N))))
            token_loss(said, known_of(update, mb, batch.version, "cpu"), objective).sum().backward()
    return torch.cat([p.grad.flatten() for p in scorer.parameters() if p.grad is not None])


@pytest.fixture(scope="module")
def scorer(tiny_model: Path) -> TokenScorer:
    lm: Any = load_language_model(tiny_model)
    torch.manual_seed(0)
    return TokenScorer(lm.float(), critic=True).float()


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
def test_the_gradient_in_float32_is_the_same_for_every_layout(scorer: TokenScorer, objective: Objective) -> None:
    batch = make_groups(0, groups=3, group_size=4, prompt=60)
    whole = gradient(scorer, batch, objective)
    order = np.random.default_rng(0).permutation(len(batch.traces))
    moved = replace(batch, traces=tuple(batch.traces[at] for at in order))
    for other in (
        gradient(scorer, batch, objective, budget=200),
        gradient(scorer, batch, objective, share=False),
        gradient(scorer, batch, objective, ranks=3, budget=400),
        gradient(scorer, moved, objective, budget=500),
    ):
        assert float((other - whole).norm() / whole.norm()) < 1e-6
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
    mine, theirs = (gradient(scorer, each, Objective()) for each in (batch, replace(batch, traces=noisy)))
    assert torch.equal(mine, theirs)


@pytest.mark.parametrize("normalisation", ["token", "sequence", "prompt", "constant"])
@given(seed=st.integers(0, 1000))
def test_what_a_token_counts_equals_its_definition(normalisation: str, seed: int) -> None:
    traces = make_batch(seed, traces=7).traces
    masked = [at % 3 == 0 for at in range(7)]
    scales = token_scales(traces, masked, LossSection(normalisation=normalisation), 50)  # type: ignore[arg-type]
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


def test_a_cut_episode_that_is_masked_stands_in_the_baseline_but_is_not_trained() -> None:
    batch = make_groups(0, groups=1, group_size=3, prompt=4)
    cut = replace(batch, traces=(replace(batch.traces[0], truncated=True), *batch.traces[1:]))
    masking, keeping = (Objective(advantage=AdvantageSection(truncated=how)) for how in ("mask", "keep"))  # type: ignore[arg-type]
    (update,), (whole,) = lessons(cut, None, masking, 64), lessons(cut, None, keeping, 64)
    assert [lesson.scale > 0 for lesson in update] == [False, True, True]
    for one, other in zip(update, whole, strict=True):
        assert_allclose(one.estimate.advantages_N, other.estimate.advantages_N)


@given(seed=st.integers(0, 1000), minibatches=st.integers(1, 5), epochs=st.integers(1, 3))
def test_an_epoch_trains_every_trace_once_and_no_group_is_cut(seed: int, minibatches: int, epochs: int) -> None:
    batch = make_batch(seed, traces=8)
    updates = lessons(batch, None, Objective(loss=LossSection(minibatches=minibatches, epochs=epochs)), 64)
    assert len(updates) == min(minibatches, 4) * epochs
    trained = [id(lesson.trace) for update in updates for lesson in update]
    assert sorted(trained) == sorted([id(trace) for trace in batch.traces] * epochs)
    for update in updates[: len(updates) // epochs]:
        groups = {lesson.trace.group for lesson in update}
        assert all((trace.group in groups) == any(lesson.trace is trace for lesson in update) for trace in batch.traces)
