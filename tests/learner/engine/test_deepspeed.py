"""DeepSpeedEngine on the tiny model, alone in this process."""

import json
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs
from transformers import AutoConfig, AutoModelForCausalLM

from horizonrl.broker.weights import digest_file
from horizonrl.common.config.objective import (
    AdvantageSection,
    CorrectionSection,
    CriticSection,
    LossSection,
    Objective,
    ReferenceSection,
)
from horizonrl.common.errors import CheckpointError, ConfigError, RunFailed
from horizonrl.learner.engine import shards
from horizonrl.learner.engine.deepspeed import DeepSpeedEngine, EngineSettings
from horizonrl.learner.engine.model import load_language_model
from horizonrl.learner.intake.batch import Batch
from tests.learner.ranks_program import run_program
from tests.learner.traces import demonstrations, make_batch, make_groups

pytestmark = [
    pytest.mark.process,
    pytest.mark.filterwarnings("ignore::FutureWarning:torch.distributed"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
]

RETURNS = Objective(advantage=AdvantageSection(kind="return"))
"""Every token's advantage is its episode's return: a step can be computed by hand."""

StartEngine = Callable[..., DeepSpeedEngine]


@pytest.fixture
def start(tiny_model: Path) -> Iterator[StartEngine]:
    """Start engines with the given settings; all are closed afterwards."""
    engines: list[DeepSpeedEngine] = []

    def start_engine(**settings: Any) -> DeepSpeedEngine:
        engines.append(DeepSpeedEngine(EngineSettings(**{"model_dir": tiny_model, "objective": RETURNS} | settings)))
        return engines[-1]

    yield start_engine
    for engine in engines:
        engine.close()


def weights_of(engine: DeepSpeedEngine, path: Path) -> torch.Tensor:
    engine.write_weights(path)
    return torch.cat([tensor.flatten().float() for _, tensor in sorted(load_file(path).items())])


def files_of(checkpoint: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in checkpoint.iterdir()}


def reference_step(model_dir: Path, batch: Batch, lr: float) -> tuple[float, float, torch.Tensor]:
    """Take the step in plain torch: float32 throughout, one unpadded row at a time, the loss written out."""
    lm: Any = load_language_model(model_dir).float()
    loss = torch.zeros(())
    for trace in batch.traces:
        ids_L = torch.from_numpy(trace.ids_L.astype(np.int64))
        scores_LV = lm(input_ids=ids_L[None]).logits[0].log_softmax(-1)
        for at in np.flatnonzero(trace.mask_L):
            A = float(trace.rewards_L.sum())
            r = (scores_LV[at - 1, ids_L[at]] - float(trace.logprobs_L[at])).exp()
            surrogate = torch.minimum(r * A, r.clamp(0.8, 1.28) * A)
            loss = loss - (torch.maximum(surrogate, torch.tensor(3 * A)) if A < 0 else surrogate)
    loss = loss / batch.trained_tokens
    loss.backward()
    grad_norm = torch.nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
    torch.optim.AdamW(lm.parameters(), lr=lr, weight_decay=0.0).step()
    named = sorted(lm.named_parameters())
    return loss.item(), float(grad_norm), torch.cat([parameter.detach().flatten() for _, parameter in named])


def cosine(first: torch.Tensor, second: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(first, second, dim=0))


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_a_step_equals_plain_torch(start: StartEngine, tiny_model: Path, tmp_path: Path, zero_stage: int) -> None:
    batch = make_batch()
    engine = start(zero_stage=zero_stage, micro_batch_tokens=128)
    before = weights_of(engine, tmp_path / "before")
    stats = engine.train_step(batch, lr=1e-2)
    loss, grad_norm, after = reference_step(tiny_model, batch, lr=1e-2)
    assert stats.loss == pytest.approx(loss, abs=5e-3)
    assert stats.grad_norm == pytest.approx(grad_norm, rel=2e-2)
    delta = weights_of(engine, tmp_path / "after") - before
    assert cosine(delta, after - before) > 0.97
    assert float(delta.norm()) == pytest.approx(float((after - before).norm()), rel=2e-2)


def test_at_stage_0_too_updates_that_are_too_small_for_bfloat16_add_up(start: StartEngine, tmp_path: Path) -> None:
    engines = [start(zero_stage=zero_stage) for zero_stage in (0, 1)]
    before = weights_of(engines[0], tmp_path / "before")
    afters = []
    for engine in engines:
        for _ in range(30):
            engine.train_step(make_batch(), 1e-6)
        afters.append(weights_of(engine, tmp_path / "after"))
    moved = [after != before for after in afters]
    # Above 2e-3 bfloat16 numbers are 1.5e-5 apart: one step of 1e-6 is lost in rounding, thirty are not.
    assert float((moved[0] & (before.abs() > 2e-3)).float().mean()) > 1e-3
    assert float((moved[1] != moved[0]).float().mean()) < 1e-4


def test_the_step_does_not_depend_on_how_the_batch_was_cut(start: StartEngine, tmp_path: Path) -> None:
    batch = make_batch(traces=8)
    whole, cut = start(micro_batch_tokens=2048), start(micro_batch_tokens=60)
    before = weights_of(whole, tmp_path / "before")
    stats, stats_cut = whole.train_step(batch, 1e-2), cut.train_step(batch, 1e-2)
    for name in ("loss", "grad_norm", "entropy", "kl", "logprob_gap", "importance_mean", "ess"):
        assert getattr(stats_cut, name) == pytest.approx(getattr(stats, name), rel=1e-2, abs=1e-3), name
    assert stats.trained_tokens == stats_cut.trained_tokens == batch.trained_tokens
    deltas = [weights_of(engine, tmp_path / "after") - before for engine in (whole, cut)]
    assert cosine(*deltas) > 0.99


def test_the_step_does_not_depend_on_sharing_prompts(start: StartEngine, tmp_path: Path) -> None:
    batch = make_groups(0, groups=2, group_size=4, prompt=100)
    sharing, plain = start(zero_stage=1), start(zero_stage=3)  # stage 3 never shares
    before = weights_of(plain, tmp_path / "before")
    stats, stats_plain = sharing.train_step(batch, 1e-2), plain.train_step(batch, 1e-2)
    for name in ("loss", "grad_norm", "entropy", "kl", "logprob_gap", "importance_mean", "ess"):
        assert getattr(stats, name) == pytest.approx(getattr(stats_plain, name), rel=1e-2, abs=1e-3), name
    deltas = [weights_of(engine, tmp_path / "after") - before for engine in (sharing, plain)]
    assert cosine(*deltas) > 0.98


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_gradient_checkpointing_changes_only_the_memory(
    start: StartEngine, tiny_model: Path, tmp_path: Path, zero_stage: int
) -> None:
    with_dropout = shutil.copytree(tiny_model, tmp_path / "model")
    config = json.loads((tiny_model / "config.json").read_text())
    (with_dropout / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.5}))
    settings = {"model_dir": with_dropout, "zero_stage": zero_stage}
    engines = [start(gradient_checkpointing=checkpointing, **settings) for checkpointing in (False, True)]
    plain, checkpointed = (engine.train_step(make_batch(), 1e-3) for engine in engines)
    assert checkpointed.logprob_gap == pytest.approx(plain.logprob_gap, rel=1e-6)
    assert checkpointed.grad_norm == pytest.approx(plain.grad_norm, rel=1e-3)


def test_a_model_whose_prompts_cannot_be_shared_is_trained_and_said_once(start: StartEngine, tmp_path: Path) -> None:
    config = {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "layer_types": ["conv", "full_attention"]}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("lfm2", **config, **heads)).save_pretrained(tmp_path / "lfm2")
    with capture_logs() as logs:
        engine = start(model_dir=tmp_path / "lfm2")
        norms = [engine.train_step(make_groups(seed, 2, 4, prompt=100), 1e-3).grad_norm for seed in range(2)]
    assert min(norms) > 0 and [line["event"] for line in logs] == ["prompts_not_shared"]


def test_observation_tokens_give_no_gradient(start: StartEngine) -> None:
    traces = [replace(trace, rewards_L=(~trace.mask_L).astype(np.float32)) for trace in make_batch().traces]
    assert start().train_step(Batch(tuple(traces), 1), 1e-3).grad_norm == 0.0


def test_imitation_learns_a_sequence_by_heart(start: StartEngine) -> None:
    engine, batch = start(), make_batch(traces=2)
    losses = [engine.train_step(demonstrations(batch), 5e-3).loss for _ in range(8)]
    assert losses[-1] < 0.6 * losses[0]


def test_demonstrations_are_fitted_at_temperature_1_whatever_the_rollouts(start: StartEngine) -> None:
    batch = make_batch()
    mixed = replace(batch, traces=tuple(replace(t, demo=at % 2 == 0) for at, t in enumerate(batch.traces)))
    quiet = replace(mixed, traces=tuple(replace(t, rewards_L=0 * t.rewards_L) for t in mixed.traces))
    hot, cold = (start(temperature=temperature).train_step(quiet, 0.0) for temperature in (1.0, 0.25))
    assert cold.loss == pytest.approx(hot.loss, rel=1e-6) and cold.grad_norm == pytest.approx(hot.grad_norm, rel=1e-6)
    assert cold.logprob_gap > 1.1 * hot.logprob_gap


def test_imitation_leaves_out_what_it_cannot_measure(start: StartEngine) -> None:
    stats = start().train_step(demonstrations(make_batch()), 1e-3)
    assert stats.trained_tokens == make_batch().trained_tokens and stats.entropy > 0
    assert all(math.isnan(getattr(stats, name)) for name in ("kl", "logprob_gap", "importance_mean", "ess"))


def test_a_policy_that_scores_its_own_samples_has_no_gap(start: StartEngine, tiny_model: Path) -> None:
    lm: Any = load_language_model(tiny_model)
    traces = []
    for trace in make_batch().traces:
        with torch.no_grad():
            scores_LV = lm(input_ids=torch.from_numpy(trace.ids_L)[None].long()).logits[0].float().log_softmax(-1)
        mu_L = scores_LV[:-1].gather(1, torch.from_numpy(trace.ids_L).long()[1:, None])[:, 0].numpy()
        traces.append(replace(trace, logprobs_L=np.where(trace.mask_L, np.concatenate([[0], mu_L]), 0)))
    stats = start().train_step(Batch(tuple(replace(t, versions_L=t.versions_L.clip(max=1)) for t in traces), 1), 0.0)
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
    assert engine.logprob_gap_at(batch.traces[0], 3, tmp_path / "v3") == pytest.approx(measured, rel=1e-3)
    engine.write_weights(tmp_path / "v4")
    assert engine.logprob_gap_at(batch.traces[0], 3, tmp_path / "v4") != pytest.approx(measured, rel=1e-2)


def test_without_learning_rate_the_weights_stay(start: StartEngine, tmp_path: Path) -> None:
    engine = start()
    first = engine.write_weights(tmp_path / "first")
    engine.train_step(make_batch(), 0.0)
    assert engine.write_weights(tmp_path / "second") == first


def test_the_weights_file_has_hugging_face_names_and_its_own_digest(
    start: StartEngine, tiny_model: Path, tmp_path: Path
) -> None:
    digest = start().write_weights(tmp_path / "weights.safetensors")
    written, original = load_file(tmp_path / "weights.safetensors"), load_file(tiny_model / "model.safetensors")
    assert written.keys() == original.keys()
    assert all(torch.equal(written[name], original[name]) for name in original)
    assert digest == digest_file(tmp_path / "weights.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["weights.safetensors"]


def test_a_gradient_that_is_not_finite_ends_the_run(start: StartEngine) -> None:
    traces = [replace(trace, rewards_L=np.full_like(trace.rewards_L, np.nan)) for trace in make_batch().traces]
    with pytest.raises(RunFailed, match="resume from the last checkpoint"):
        start().train_step(Batch(tuple(traces), 1), 1e-3)


def test_a_batch_that_trains_nothing_is_refused(start: StartEngine) -> None:
    with pytest.raises(ValueError, match="without trained tokens"):
        start().train_step(Batch((), 0), 1e-3)


def test_a_trace_over_the_budget_is_refused(start: StartEngine) -> None:
    with pytest.raises(ConfigError, match="micro_batch_tokens"):
        start(micro_batch_tokens=10).train_step(make_batch(), 1e-3)


def test_the_trust_region_is_the_settings_one(start: StartEngine) -> None:
    traces = [replace(t, logprobs_L=np.where(t.mask_L, -30, 0).astype(np.float32)) for t in make_batch().traces]
    for dual_clip, stopped in ((3.0, 1.0), (None, None)):
        engine = start(objective=Objective(advantage=RETURNS.advantage, loss=LossSection(dual_clip=dual_clip)))
        stats = engine.train_step(Batch(tuple(traces), 1), 1e-3)
        assert (stats.clip_share == 1.0 and stats.grad_norm == 0.0) is (stopped is not None)


GAE = Objective(advantage=AdvantageSection(kind="gae"), critic=CriticSection(lr=1e-2))
KL = Objective(advantage=RETURNS.advantage, reference=ReferenceSection(kl=0.1))


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_the_critic_learns_and_its_state_is_resumed_bit_for_bit(
    start: StartEngine, tmp_path: Path, zero_stage: int
) -> None:
    engine, resumed = (start(zero_stage=zero_stage, objective=GAE) for _ in range(2))
    errors = [engine.train_step(make_batch(), 0.0).value_error for _ in range(6)]
    assert errors[-1] < 0.7 * errors[0]
    engine.save(tmp_path / "checkpoint", {})
    resumed.train_step(make_batch(7), 1e-3)
    resumed.load(tmp_path / "checkpoint")
    seen = []
    for each in (engine, resumed):
        stats = each.train_step(make_batch(1), 1e-3)
        seen.append((stats.value_error, stats.loss, each.write_weights(tmp_path / "weights")))
    assert seen[0] == seen[1]


def test_the_critic_leaves_the_weights_that_actors_get_as_they_are(start: StartEngine, tmp_path: Path) -> None:
    engine = start(objective=GAE)
    first = engine.write_weights(tmp_path / "first")
    engine.train_step(make_batch(), 0.0)
    assert engine.write_weights(tmp_path / "second") == first


def test_the_reference_is_the_policy_at_the_start_of_rl(start: StartEngine) -> None:
    engine = start(objective=KL)
    engine.train_step(demonstrations(make_batch()), 1e-2)
    kls = [engine.train_step(make_batch(seed, version=1 + seed), 1e-2).reference_kl for seed in range(3)]
    assert kls[0] == pytest.approx(0.0, abs=1e-6) and min(kls[1:]) > 1e-3


def test_the_reference_moves_forward_when_asked(start: StartEngine) -> None:
    moving = Objective(advantage=RETURNS.advantage, reference=ReferenceSection(kl=0.1, refresh_every=2))
    engine = start(objective=moving)
    kls = [engine.train_step(make_batch(seed, version=seed), 1e-2).reference_kl for seed in range(4)]
    assert [kl > 1e-3 for kl in kls] == [False, True, False, True]


def test_the_reference_is_resumed_bit_for_bit(start: StartEngine, tmp_path: Path) -> None:
    engine, resumed = start(objective=KL), start(objective=KL)
    for seed in (0, 1):
        engine.train_step(make_batch(seed), 1e-2)
    engine.save(tmp_path / "checkpoint", {})
    resumed.load(tmp_path / "checkpoint")
    kls = {each.train_step(make_batch(2), 1e-2).reference_kl for each in (engine, resumed)}
    assert len(kls) == 1 and min(kls) > 1e-3


def test_a_batch_may_make_several_updates(start: StartEngine, tmp_path: Path) -> None:
    one, several = start(), start(objective=Objective(loss=LossSection(minibatches=2, epochs=2)))
    counts = []
    for at, engine in enumerate((one, several)):
        engine.train_step(make_batch(), 1e-3)
        engine.save(tmp_path / f"{at}", {})
        counts.append(json.loads((tmp_path / f"{at}" / "engine.json").read_text())["optimizer_steps"])
    assert counts == [1, 4]


def test_a_second_update_is_corrected_from_the_policy_that_the_first_began_with(start: StartEngine) -> None:
    """With the exact proximal policy ρ leaves 1 only by the updates before; on-policy a first one stops nothing."""
    loss = LossSection(kind="decoupled_ppo", epochs=4, clip_low=1e-3, clip_high=1e-3)
    engine = start(objective=Objective(advantage=RETURNS.advantage, loss=loss))
    assert engine.train_step(make_batch(), 0.0).clip_share == 0.0
    assert engine.train_step(make_batch(), 1e-2).clip_share > 0.1


def test_the_entropy_bonus_raises_the_entropy(start: StartEngine) -> None:
    quiet = [replace(trace, rewards_L=np.zeros_like(trace.rewards_L)) for trace in make_batch().traces]
    engine = start(objective=Objective(advantage=RETURNS.advantage, loss=LossSection(entropy=1.0)))
    entropies = [engine.train_step(Batch(tuple(quiet), 1), 1e-3).entropy for _ in range(4)]
    assert entropies[-1] > entropies[0] + 0.01


def test_a_low_effective_sample_size_of_episodes_lowers_the_learning_rate(
    start: StartEngine, tiny_model: Path, tmp_path: Path
) -> None:
    lm: Any = load_language_model(tiny_model)
    products = []
    for trace in make_batch().traces:
        with torch.no_grad():
            scores_LV = lm(input_ids=torch.from_numpy(trace.ids_L)[None].long()).logits[0].float().log_softmax(-1)
        asked = np.flatnonzero(trace.mask_L)
        log_ratios = scores_LV[asked - 1, trace.ids_L[asked]].numpy() - trace.logprobs_L[asked]
        products.append(np.exp(log_ratios.astype(np.float64).sum()))
    scale = math.sqrt(sum(products) ** 2 / (len(products) * sum(product**2 for product in products)))
    lengths = []
    for scaled in (False, True):
        engine = start(objective=Objective(advantage=RETURNS.advantage, correction=CorrectionSection(ess_lr=scaled)))
        before = weights_of(engine, tmp_path / "before")
        stats = engine.train_step(make_batch(), 1e-2)
        assert stats.lr == pytest.approx(1e-2 * scale if scaled else 1e-2, rel=0.02)
        lengths.append(float((weights_of(engine, tmp_path / "after") - before).norm()))
    assert scale < 0.9 * math.sqrt(stats.ess)
    assert lengths[1] / lengths[0] == pytest.approx(scale, rel=0.05)


def test_demonstrations_may_stand_beside_episodes(start: StartEngine) -> None:
    batch = make_batch()
    mixed = replace(batch, traces=tuple(replace(t, demo=at % 2 == 0) for at, t in enumerate(batch.traces)))
    stats = start(objective=Objective()).train_step(mixed, 1e-3)
    assert stats.trained_tokens == batch.trained_tokens and math.isfinite(stats.ess)


def test_a_resumed_engine_makes_the_same_weights_bit_for_bit(
    start: StartEngine, tiny_model: Path, tmp_path: Path
) -> None:
    engine = start(micro_batch_tokens=128, objective=Objective())
    for seed in (0, 1):
        engine.train_step(make_batch(seed), 1e-3)
    engine.save(tmp_path / "checkpoint", {"cursor": 7})
    engine.train_step(make_batch(2), 1e-3)
    digest = engine.write_weights(tmp_path / "weights.safetensors")
    (resumed,) = run_program("resume", tiny_model, tmp_path, ranks=1)
    assert resumed["state"] == {"cursor": 7}
    assert resumed["digest"] == digest


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_at_every_stage_a_resumed_engine_goes_on_bit_for_bit(
    start: StartEngine, tmp_path: Path, zero_stage: int
) -> None:
    engine, resumed = start(zero_stage=zero_stage), start(zero_stage=zero_stage)
    engine.train_step(make_batch(0), 1e-3)
    engine.save(tmp_path / "checkpoint", {})
    digests = [engine.write_weights(tmp_path / "weights")]
    engine.train_step(make_batch(1), 1e-3)
    digests.append(engine.write_weights(tmp_path / "weights"))
    resumed.train_step(make_batch(7), 1e-3)  # leaves nothing behind
    resumed.load(tmp_path / "checkpoint")
    digests_resumed = [resumed.write_weights(tmp_path / "weights")]
    resumed.train_step(make_batch(1), 1e-3)
    assert [*digests_resumed, resumed.write_weights(tmp_path / "weights")] == digests


def test_a_checkpoint_of_one_stage_resumes_at_any_other(start: StartEngine, tmp_path: Path) -> None:
    engines = [start(zero_stage=zero_stage) for zero_stage in (1, 2, 3, 0)]
    engines[0].train_step(make_batch(0), 1e-3)
    engines[0].save(tmp_path / "0", {})
    for at, engine in enumerate(engines[1:]):
        engine.load(tmp_path / f"{at}")
        engine.save(tmp_path / f"{at + 1}", {})
    assert files_of(tmp_path / "3") == files_of(tmp_path / "0")
    assert len({engine.write_weights(tmp_path / "weights") for engine in engines}) == 1
    norms = [engine.train_step(make_batch(1), 1e-3).grad_norm for engine in engines]
    assert norms == pytest.approx([norms[0]] * 4, rel=1e-2)


def test_a_checkpoint_from_before_the_first_step_can_be_loaded(start: StartEngine, tmp_path: Path) -> None:
    engine, resumed = start(), start()
    engine.save(tmp_path / "checkpoint", {})
    resumed.train_step(make_batch(7), 1e-3)
    resumed.load(tmp_path / "checkpoint")
    digests = set()
    for each in (engine, resumed):
        each.train_step(make_batch(0), 1e-3)
        digests.add(each.write_weights(tmp_path / "weights"))
    assert len(digests) == 1


def test_a_checkpoint_is_plain_files_of_limited_size(
    start: StartEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "SHARD_BYTES", 1 << 20)
    engine = start()
    engine.train_step(make_batch(), 1e-3)
    engine.save(tmp_path, {})
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["engine.json", *(f"training-{number:05d}.safetensors" for number in range(5))]
    assert all((tmp_path / file).stat().st_size < 2 << 20 for file in files)
    tensors = {name: tensor for file in files[1:] for name, tensor in load_file(tmp_path / file).items()}
    master, moment = (tensors[f"{kind}.model.norm.weight"] for kind in ("master", "exp_avg_sq"))
    assert master.dtype == moment.dtype == torch.float32 and master.shape == (128,) and moment.min() > 0
    start().load(tmp_path)


def test_a_checkpoint_of_another_model_is_refused_by_name(start: StartEngine, tmp_path: Path) -> None:
    engine = start()
    engine.save(tmp_path, {})
    (file,) = tmp_path.glob("*.safetensors")
    tensors = load_file(file)
    save_file({**tensors, "exp_avg.model.norm.weight": torch.zeros(127)}, file)
    with pytest.raises(CheckpointError, match=r"exp_avg\.model\.norm\.weight, of shape \[127\] there and \[128\] here"):
        engine.load(tmp_path)
    save_file({**tensors, "master.model.extra": torch.zeros(3)}, file)
    with pytest.raises(CheckpointError, match=r"master\.model\.extra, of shape \[3\] there and none here"):
        engine.load(tmp_path)


def test_a_damaged_checkpoint_is_refused(start: StartEngine, tmp_path: Path) -> None:
    engine = start()
    engine.save(tmp_path, {})
    (file,) = tmp_path.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="earlier checkpoint"):
        engine.load(tmp_path)


def test_a_directory_without_a_checkpoint_is_refused(start: StartEngine, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no engine's checkpoint"):
        start().load(tmp_path)
