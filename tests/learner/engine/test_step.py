"""The policy-gradient step on the tiny model: what is trained, with which loss, and what is measured."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from transformers import AutoConfig, AutoModelForCausalLM

from horizonrl.common.config.objective import CorrectionSection, Objective, ReferenceSection
from horizonrl.common.errors import ConfigError, RunFailed
from horizonrl.learner.algorithm.batch import Batch
from horizonrl.learner.engine.api import RankEngine
from horizonrl.learner.engine.checkpoint.shards import open_shards, read_engine_file
from horizonrl.learner.engine.model.model import load_language_model
from tests.learner.engines import DEEPSPEED, RETURNS, StartEngine, cosine, weights_of
from tests.learner.sections import make_advantage, make_correction, make_loss
from tests.learner.traces import demonstrations, make_batch, make_groups

pytestmark = DEEPSPEED

GAE = Objective(advantage=make_advantage(kind="gae", critic_lr=1e-2))
KL = Objective(advantage=RETURNS.advantage, reference=ReferenceSection(kl=0.1))


def test_observation_tokens_give_no_gradient(start: StartEngine) -> None:
    traces = [
        replace(trace, rewards_L=(~trace.mask_L).astype(np.float32))
        for trace in make_batch().traces
    ]
    assert start().train_step(Batch(tuple(traces), 1), 1e-3).grad_norm == 0.0


def test_imitation_learns_a_sequence_by_heart(start: StartEngine) -> None:
    engine, batch = start(), make_batch(traces=2)
    losses = [engine.train_step(demonstrations(batch), 5e-3).loss for _ in range(8)]
    assert losses[-1] < 0.6 * losses[0]


def test_demonstrations_are_fitted_at_temperature_1_whatever_the_rollouts(
    start: StartEngine,
) -> None:
    batch = make_batch()
    mixed = replace(
        batch, traces=tuple(replace(t, demo=index % 2 == 0) for index, t in enumerate(batch.traces))
    )
    quiet = replace(
        mixed, traces=tuple(replace(t, rewards_L=0 * t.rewards_L) for t in mixed.traces)
    )
    hot, cold = (
        start(temperature=temperature).train_step(quiet, 0.0) for temperature in (1.0, 0.25)
    )
    assert cold.loss == pytest.approx(hot.loss, rel=1e-6) and cold.grad_norm == pytest.approx(
        hot.grad_norm, rel=1e-6
    )
    assert cold.logprob_gap > 1.1 * hot.logprob_gap


def test_imitation_leaves_out_what_it_cannot_measure(start: StartEngine) -> None:
    stats = start().train_step(demonstrations(make_batch()), 1e-3)
    assert stats.trained_tokens == make_batch().trained_tokens and stats.entropy > 0
    assert all(
        math.isnan(getattr(stats, name)) for name in ("kl", "logprob_gap", "importance_mean", "ess")
    )


def test_a_policy_that_scores_its_own_samples_has_no_gap(
    start: StartEngine, tiny_model: Path
) -> None:
    lm: Any = load_language_model(tiny_model)
    traces = []
    for trace in make_batch().traces:
        with torch.no_grad():
            scores_LV = (
                lm(input_ids=torch.from_numpy(trace.ids_L)[None].long())
                .logits[0]
                .float()
                .log_softmax(-1)
            )
        mu_L = (
            scores_LV[:-1].gather(1, torch.from_numpy(trace.ids_L).long()[1:, None])[:, 0].numpy()
        )
        traces.append(
            replace(trace, logprobs_L=np.where(trace.mask_L, np.concatenate([[0], mu_L]), 0))
        )
    stats = start().train_step(
        Batch(tuple(replace(t, versions_L=t.versions_L.clip(max=1)) for t in traces), 1), 0.0
    )
    assert stats.logprob_gap < 0.05 and stats.logprob_gap_fresh < 0.05
    assert stats.ess > 0.99 and stats.importance_mean == pytest.approx(1.0, abs=0.02)


def test_the_gap_at_an_earlier_version_is_measured_with_that_versions_weights(
    start: StartEngine, tmp_path: Path
) -> None:
    engine = start()
    (trace,) = make_batch(traces=1, version=3).traces
    mask_L = trace.mask_L
    batch = Batch((replace(trace, versions_L=np.where(mask_L, 3, -1).astype(np.int32)),), version=3)
    engine.write_weights(tmp_path / "v3")
    measured = engine.train_step(batch, lr=1e-2).logprob_gap_fresh
    assert engine.logprob_gap_at(batch.traces[0], 3, tmp_path / "v3") == pytest.approx(
        measured, rel=1e-3
    )
    engine.write_weights(tmp_path / "v4")
    assert engine.logprob_gap_at(batch.traces[0], 3, tmp_path / "v4") != pytest.approx(
        measured, rel=1e-2
    )


def test_without_learning_rate_the_weights_stay(start: StartEngine, tmp_path: Path) -> None:
    engine = start()
    first = engine.write_weights(tmp_path / "first")
    engine.train_step(make_batch(), 0.0)
    assert engine.write_weights(tmp_path / "second") == first


def test_a_gradient_that_is_not_finite_ends_the_run(start: StartEngine) -> None:
    traces = [
        replace(trace, rewards_L=np.full_like(trace.rewards_L, np.nan))
        for trace in make_batch().traces
    ]
    with pytest.raises(RunFailed, match="resume from the last checkpoint"):
        start().train_step(Batch(tuple(traces), 1), 1e-3)


def test_a_trace_over_the_budget_is_refused(start: StartEngine) -> None:
    with pytest.raises(ConfigError, match="micro_batch_tokens"):
        start(micro_batch_tokens=10).train_step(make_batch(), 1e-3)


def test_the_trust_region_is_the_settings_one(start: StartEngine) -> None:
    traces = [
        replace(t, logprobs_L=np.where(t.mask_L, -30, 0).astype(np.float32))
        for t in make_batch().traces
    ]
    for dual_clip, stopped in ((3.0, 1.0), (None, None)):
        engine = start(
            objective=Objective(advantage=RETURNS.advantage, loss=make_loss(dual_clip=dual_clip))
        )
        stats = engine.train_step(Batch(tuple(traces), 1), 1e-3)
        assert (stats.clip_share == 1.0 and stats.grad_norm == 0.0) is (stopped is not None)


def test_the_critic_leaves_the_weights_that_actors_get_as_they_are(
    start: StartEngine, tmp_path: Path
) -> None:
    engine = start(objective=GAE)
    first = engine.write_weights(tmp_path / "first")
    engine.train_step(make_batch(), 0.0)
    assert engine.write_weights(tmp_path / "second") == first


def test_at_a_rate_of_0_the_gradient_is_the_critics_alone(start: StartEngine) -> None:
    alone, both = (
        start(objective=GAE).train_step(make_batch(), lr).grad_norm for lr in (0.0, 1e-3)
    )
    assert 0 < alone < 0.99 * both


@pytest.mark.parametrize(
    "settings", [{"backend": "torch"}, *({"zero_stage": stage} for stage in range(4))], ids=str
)
def test_a_group_that_pauses_counts_no_step_and_its_first_one_is_as_large_as_the_rate(
    start: StartEngine, tmp_path: Path, settings: dict[str, Any]
) -> None:
    engine, rate, moved = start(objective=GAE, **settings), 1e-3, []
    batches = [*([make_batch()] * 3), demonstrations(make_batch()), make_batch()]
    masters = _masters(engine, tmp_path / "0")
    for step, (batch, lr) in enumerate(zip(batches, (0.0, 0.0, rate, rate, rate), strict=True), 1):
        engine.train_step(batch, lr)
        before, masters = masters, _masters(engine, tmp_path / f"{step}")
        moved.append({name: (masters[name] - before[name]).abs().max().item() for name in masters})
    policy = [
        max(change for name, change in moves.items() if "critic" not in name) for moves in moved
    ]
    critic = [max(change for name, change in moves.items() if "critic" in name) for moves in moved]
    assert policy[:2] == [0.0, 0.0] and policy[2] == pytest.approx(rate, rel=0.01), (
        "AdamW's first step is its rate"
    )
    assert [change > 0 for change in critic] == [True, True, True, False, True]
    assert json.loads((tmp_path / "5" / "engine.json").read_text())["optimizer_steps"] == [3, 4]
    again = start(objective=GAE, **settings)
    again.load(tmp_path / "5")
    again.save(tmp_path / "again", {})
    assert (tmp_path / "again" / "engine.json").read_text() == (
        tmp_path / "5" / "engine.json"
    ).read_text()


def _masters(engine: RankEngine, directory: Path) -> dict[str, torch.Tensor]:
    """Return the float32 weights by name, from a checkpoint made for it."""
    engine.save(directory, {})
    with open_shards(directory, read_engine_file(directory)["files"]) as shards:
        return {name: shards.read(name) for name in shards.shapes if name.startswith("master.")}


def test_the_reference_is_the_policy_at_the_start_of_rl(start: StartEngine) -> None:
    engine = start(objective=KL)
    engine.train_step(demonstrations(make_batch()), 1e-2)
    kls = [
        engine.train_step(make_batch(seed, version=1 + seed), 1e-2).reference_kl
        for seed in range(3)
    ]
    assert kls[0] == pytest.approx(0.0, abs=1e-6) and min(kls[1:]) > 1e-3


def test_the_reference_moves_forward_when_asked(start: StartEngine) -> None:
    moving = Objective(
        advantage=RETURNS.advantage, reference=ReferenceSection(kl=0.1, refresh_every=2)
    )
    engine = start(objective=moving)
    kls = [
        engine.train_step(make_batch(seed, version=seed), 1e-2).reference_kl for seed in range(4)
    ]
    assert [kl > 1e-3 for kl in kls] == [False, True, False, True]


def test_a_batch_may_make_several_updates(start: StartEngine, tmp_path: Path) -> None:
    one, several = start(), start(objective=Objective(loss=make_loss(minibatches=2, epochs=2)))
    counts = []
    for index, engine in enumerate((one, several)):
        engine.train_step(make_batch(), 1e-3)
        engine.save(tmp_path / f"{index}", {})
        counts.append(
            json.loads((tmp_path / f"{index}" / "engine.json").read_text())["optimizer_steps"]
        )
    assert counts == [[1], [4]]


def test_an_update_that_finds_too_large_a_kl_is_the_last_of_its_batch(start: StartEngine) -> None:
    def updates(kl_max: float | None) -> int:
        engine = start(
            objective=Objective(
                advantage=RETURNS.advantage, loss=make_loss(epochs=4, kl_max=kl_max)
            )
        )
        return engine.train_step(make_batch(), 1e-2).updates

    assert (updates(None), updates(1e-9), updates(1e9)) == (4, 1, 4)


@pytest.mark.parametrize(
    "keys",
    [
        {"kind": "decoupled_ppo", "epochs": 4, "low": 1e-3, "high": 1e-3},
        {"kind": "gspo", "minibatches": 3, "shuffle": True, "low": 0, "high": 0},
    ],
)
def test_a_second_update_is_corrected_from_the_policy_that_the_first_began_with(
    start: StartEngine, keys: dict[str, Any]
) -> None:
    """With the exact proximal policy ρ leaves 1 only by the updates before; on-policy a first one stops nothing."""
    engine = start(objective=Objective(advantage=RETURNS.advantage, loss=make_loss(**keys)))
    assert engine.train_step(make_batch(), 0.0).clip_share == 0.0
    assert engine.train_step(make_batch(), 1e-2).clip_share > 0.1


def test_the_entropy_bonus_raises_the_entropy(start: StartEngine) -> None:
    quiet = [
        replace(trace, rewards_L=np.zeros_like(trace.rewards_L)) for trace in make_batch().traces
    ]
    engine = start(objective=Objective(advantage=RETURNS.advantage, loss=make_loss(entropy=1.0)))
    entropies = [engine.train_step(Batch(tuple(quiet), 1), 1e-3).entropy for _ in range(4)]
    assert entropies[-1] > entropies[0] + 0.01


def test_a_low_effective_sample_size_of_episodes_lowers_the_learning_rate(
    start: StartEngine, tiny_model: Path, tmp_path: Path
) -> None:
    lm: Any = load_language_model(tiny_model)
    products = []
    for trace in make_batch().traces:
        with torch.no_grad():
            scores_LV = (
                lm(input_ids=torch.from_numpy(trace.ids_L)[None].long())
                .logits[0]
                .float()
                .log_softmax(-1)
            )
        asked = np.flatnonzero(trace.mask_L)
        log_ratios = scores_LV[asked - 1, trace.ids_L[asked]].numpy() - trace.logprobs_L[asked]
        products.append(np.exp(log_ratios.astype(np.float64).sum()))
    scale = math.sqrt(
        sum(products) ** 2 / (len(products) * sum(product**2 for product in products))
    )
    lengths = []
    for scaled in (False, True):
        engine = start(
            objective=Objective(
                advantage=RETURNS.advantage, correction=make_correction(ess_lr=scaled)
            )
        )
        before = weights_of(engine, tmp_path / "before")
        stats = engine.train_step(make_batch(), 1e-2)
        assert stats.lr == pytest.approx(1e-2 * scale if scaled else 1e-2, rel=0.02)
        lengths.append(float((weights_of(engine, tmp_path / "after") - before).norm()))
    assert scale < 0.9 * math.sqrt(stats.ess)
    assert lengths[1] / lengths[0] == pytest.approx(scale, rel=0.05)


def test_the_step_does_not_depend_on_how_the_batch_was_cut(
    start: StartEngine, tmp_path: Path
) -> None:
    batch = make_batch(traces=8)
    whole, cut = start(micro_batch_tokens=2048), start(micro_batch_tokens=60)
    before = weights_of(whole, tmp_path / "before")
    stats, stats_cut = whole.train_step(batch, 1e-2), cut.train_step(batch, 1e-2)
    for name in ("loss", "grad_norm", "entropy", "kl", "logprob_gap", "importance_mean", "ess"):
        assert getattr(stats_cut, name) == pytest.approx(
            getattr(stats, name), rel=1e-2, abs=1e-3
        ), name
    assert stats.trained_tokens == stats_cut.trained_tokens == batch.trained_tokens
    deltas = [weights_of(engine, tmp_path / "after") - before for engine in (whole, cut)]
    assert cosine(*deltas) > 0.99


def test_a_model_whose_prompts_cannot_be_shared_is_trained_and_said_once(
    start: StartEngine, tmp_path: Path
) -> None:
    config = {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "layer_types": ["conv", "full_attention"],
    }
    AutoModelForCausalLM.from_config(
        AutoConfig.for_model("lfm2", **config, **heads)
    ).save_pretrained(tmp_path / "lfm2")
    with capture_logs() as logs:
        engine = start(model_dir=tmp_path / "lfm2")
        norms = [
            engine.train_step(make_groups(seed, 2, 4, prompt=100), 1e-3).grad_norm
            for seed in range(2)
        ]
    assert min(norms) > 0 and [line["event"] for line in logs] == ["prompts_not_shared"]


def test_demonstrations_may_stand_beside_episodes(start: StartEngine) -> None:
    batch = make_batch()
    mixed = replace(
        batch, traces=tuple(replace(t, demo=index % 2 == 0) for index, t in enumerate(batch.traces))
    )
    stats = start(objective=Objective()).train_step(mixed, 1e-3)
    assert stats.trained_tokens == batch.trained_tokens and math.isfinite(stats.ess)


GEOMETRIC = make_correction(geometric_band=(0.9, 1.1))


@pytest.mark.parametrize(
    ("backend", "correction"),
    [
        ("deepspeed", GEOMETRIC),
        ("torch", GEOMETRIC),
        ("torch", make_correction(k3_max=1e-9)),
        ("torch", make_correction(veto_band=(0.9, 1.1))),
        ("torch", make_correction(stale_negative_max=1e-9)),
        ("torch", make_correction(kind="icepop", band=(0.9, 1.1))),
    ],
)
def test_a_batch_that_a_correction_drops_whole_leaves_the_policy_as_it_is(
    start: StartEngine, tmp_path: Path, backend: str, correction: CorrectionSection
) -> None:
    reinforce = make_loss(kind="reinforce")
    objective = Objective(advantage=RETURNS.advantage, correction=correction, loss=reinforce)
    engine = start(objective=objective, backend=backend)
    first, batch = make_batch(0), make_batch(1, version=2)
    engine.train_step(demonstrations(first), 1e-3)
    before = weights_of(engine, tmp_path / "before")
    # Sampled by a policy that found each token likelier, and rewarded below 0: what every correction here drops.
    traces = [
        replace(t, logprobs_L=np.where(t.mask_L, -1e-3, 0).astype(np.float32)) for t in batch.traces
    ]
    traces = [replace(t, rewards_L=-np.abs(t.rewards_L)) for t in traces]
    stats = engine.train_step(replace(batch, traces=tuple(traces)), 1e-3)
    assert (stats.grad_norm, stats.lr) == (0.0, 0.0)
    assert torch.equal(weights_of(engine, tmp_path / "after"), before)
    assert engine.train_step(demonstrations(first), 1e-3).lr == 1e-3
    assert not torch.equal(weights_of(engine, tmp_path / "moved"), before)
