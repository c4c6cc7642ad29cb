"""Adapters are trained, and everybody else sees a full model's weights."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from horizonrl.broker.api import Key
from horizonrl.broker.memory import MemoryServer, MemoryTransport
from horizonrl.broker.state import StateStore
from horizonrl.broker.weights.adapters import ALPHA, merge_adapters
from horizonrl.common.config.objective import Objective, ReferenceSection
from horizonrl.common.errors import CheckpointError, ConfigError, MissingDependency
from horizonrl.common.state import WeightsManifest
from horizonrl.common.types import PolicyVersion
from horizonrl.learner.algorithm.batch import Batch
from horizonrl.learner.engine.api import RankEngine
from horizonrl.learner.engine.checkpoint.weights_file import ADAPTERS
from horizonrl.learner.engine.model.lora import add_adapters, merged, policy_weights
from horizonrl.learner.engine.model.model import load_language_model
from horizonrl.learner.loop.fence import Fence
from horizonrl.learner.loop.weights_publisher import WeightsPublisher
from horizonrl.ops.models.tiny_model import make_tiny_model
from tests.learner.engines import DEEPSPEED, RETURNS, StartEngine
from tests.learner.sections import make_advantage
from tests.learner.traces import demonstrations, make_batch, make_groups
from tests.weights import ShadowHost

pytestmark = DEEPSPEED

RANK, LAYERS = 4, 2
KL = Objective(advantage=RETURNS.advantage, reference=ReferenceSection(kl=0.1))
GAE = Objective(advantage=make_advantage(kind="gae", critic_lr=1e-2))
SIDES = {"q_proj": 128 + 128, "k_proj": 128 + 64, "v_proj": 128 + 64, "o_proj": 128 + 128}
SIDES |= {"gate_proj": 128 + 256, "up_proj": 128 + 256, "down_proj": 256 + 128}
"""Input and output width of each linear layer of the tiny model, added up."""


@pytest.fixture
def start(start: StartEngine) -> StartEngine:
    """Start engines with adapters and the given settings."""
    return lambda **settings: start(**{"lora_rank": RANK} | settings)


def written(engine: RankEngine, path: Path) -> dict[str, torch.Tensor]:
    engine.write_weights(path)
    return load_file(path)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.int16), other.view(torch.int16))


def cosine(
    first: dict[str, torch.Tensor], second: dict[str, torch.Tensor], before: dict[str, torch.Tensor]
) -> float:
    moved = [
        torch.cat([(w[n].float() - before[n].float()).flatten() for n in before])
        for w in (first, second)
    ]
    return float(torch.nn.functional.cosine_similarity(*moved, dim=0))


def test_a_merged_weight_is_the_sum_rounded_once() -> None:
    dice = torch.Generator().manual_seed(0)
    W, A, B = (torch.randn(shape, generator=dice).bfloat16() for shape in ((6, 5), (2, 5), (6, 2)))
    exact = W.double() + ALPHA / 2 * (B.double() @ A.double())
    assert torch.equal(merged(W, A, B), exact.float().bfloat16())
    assert merged(W) is W


@pytest.mark.parametrize("rank", [1, 3, 16])
def test_torch_and_numba_merge_to_the_same_bits(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    dice = torch.Generator().manual_seed(rank)
    W, A, B = (
        torch.randn(shape, generator=dice).bfloat16()
        for shape in ((700, 300), (rank, 300), (700, rank))
    )
    W[0, :4] = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0])
    compiled = merged(W, A, B)

    def missing(*_: Any) -> None:
        raise MissingDependency("weights as adapters need numba")

    monkeypatch.setattr("horizonrl.learner.engine.model.lora.add_adapter", missing)
    assert torch.equal(merged(W, A, B).view(torch.int16), compiled.view(torch.int16))


def test_an_actor_makes_the_learners_weights_from_the_base_and_the_adapters(
    start: StartEngine, tmp_path: Path
) -> None:
    """The tiny model's head is tied: it has no tensor of its own, in the base and in the weights."""
    engine = start()
    engine.write_weights(tmp_path / "base.safetensors")
    for seed in range(2):
        engine.train_step(make_batch(seed), 1e-2)
    engine.write_weights(tmp_path / "weights.safetensors")
    engine.save(tmp_path / "checkpoint", {})
    resumed = start(zero_stage=3)
    resumed.load(tmp_path / "checkpoint")
    resumed.write_weights(tmp_path / "resumed.safetensors")
    base, weights = (
        (tmp_path / f"{name}.safetensors").read_bytes() for name in ("base", "weights")
    )
    assert base != weights
    for name in ("weights", "resumed"):
        found = bytearray(len(base))
        merge_adapters(base, (tmp_path / name).with_suffix(ADAPTERS).read_bytes(), found)
        assert found == weights


async def test_hosts_follow_adapters_in_training_through_the_broker_and_a_resume(
    start: StartEngine, tmp_path: Path
) -> None:
    transport = MemoryTransport(MemoryServer(), "run")
    host, late = (ShadowHost(transport, tmp_path / name) for name in ("host", "late"))
    engine = start(backend="torch")
    for lineage in (0, 1):
        publisher = WeightsPublisher(
            transport, Fence(transport), tmp_path / "weights", share_files=False
        )
        if lineage == 1:  # as `Recovery.resume` does it
            engine = start(backend="torch")
        engine.write_weights(publisher.base_file)
        if lineage == 1:
            engine.load(tmp_path / "checkpoint")
        for version in range(1 + lineage, 4 + lineage):
            engine.train_step(make_batch(version), 1e-2)
            policy = PolicyVersion(version=version, lineage=lineage)
            await publisher.publish(policy, engine.write_weights(publisher.path_for(policy)))
            manifest = await StateStore(transport).get(Key.POLICY)
            assert isinstance(manifest, WeightsManifest)
            assert await host.load(manifest) == publisher.path_for(policy).read_bytes()
        engine.save(tmp_path / "checkpoint", {})
    assert await late.load(manifest) == publisher.path_for(policy).read_bytes()
    assert host.received("base") == manifest.weights_bytes, "the frozen model went once"
    assert host.received("changes") > 0
    assert host.received("changes") + host.received("frame") < manifest.weights_bytes


def test_every_linear_layer_but_the_head_has_an_adapter_and_nothing_else_is_trained(
    tiny_model: Path,
) -> None:
    lm = load_language_model(tiny_model)
    names = [name for name, _ in lm.named_parameters()]
    add_adapters(lm, RANK)
    trained = {name: p for name, p in lm.named_parameters() if p.requires_grad}
    assert sum(p.numel() for p in trained.values()) == LAYERS * RANK * sum(SIDES.values())
    assert all(".lora_" in name for name in trained)
    assert [name for name, _ in policy_weights(lm)] == names
    assert {
        name.split(".")[-2] for name, parts in policy_weights(lm) if len(parts) == 3
    } == SIDES.keys()


def test_all_stages_and_layouts_begin_with_the_base_and_take_the_same_step_of_what_has_adapters(
    start: StartEngine, tiny_model: Path, tmp_path: Path
) -> None:
    """Stages 2 and 3 share no prompts, a small budget cuts the batch: each stands for another way through the model."""
    batch = make_groups(0, groups=2, group_size=4, prompt=60)
    layouts = [{"zero_stage": stage} for stage in range(4)]
    layouts += [{"micro_batch_tokens": 128}, {"gradient_checkpointing": True}]
    base = load_file(tiny_model / "model.safetensors")
    stats, weights = [], []
    for layout in layouts:
        engine = start(**layout)
        before = written(engine, tmp_path / "before")
        assert before.keys() == base.keys()
        assert all(same_bits(before[name], base[name]) for name in base)
        stats.append(engine.train_step(batch, 1e-2))
        weights.append(written(engine, tmp_path / "weights"))
        changed = {name for name in base if not same_bits(weights[-1][name], base[name])}
        assert changed == {name for name in base if name.split(".")[-2] in SIDES}
        engine.train_step(batch, 0.0)
        again = written(engine, tmp_path / "again")
        assert all(same_bits(again[name], weights[-1][name]) for name in base)
    assert [s.loss for s in stats] == pytest.approx([stats[0].loss] * len(layouts), rel=1e-2)
    assert [s.grad_norm for s in stats] == pytest.approx(
        [stats[0].grad_norm] * len(layouts), rel=2e-2
    )
    assert min(cosine(weights[0], other, base) for other in weights[1:]) > 0.97


def sampled_by(lm: Any, batch: Batch) -> Batch:
    """The batch as if the model had sampled it: its logprobs are the recorded ones, of the version in training."""
    traces = []
    for trace in batch.traces:
        ids_L = torch.from_numpy(trace.ids_L).long()
        with torch.no_grad():
            scores_LV = lm(input_ids=ids_L[None]).logits[0].float().log_softmax(-1)
        mu_L = np.append(0, scores_LV[:-1].gather(1, ids_L[1:, None])[:, 0].numpy())
        versions_L = np.where(trace.mask_L, batch.version, -1).astype(np.int32)
        logprobs_L = np.where(trace.mask_L, mu_L, 0).astype(np.float32)
        traces.append(replace(trace, logprobs_L=logprobs_L, versions_L=versions_L))
    return replace(batch, traces=tuple(traces))


def test_a_plain_model_with_the_merged_weights_says_what_the_engine_says(
    start: StartEngine, tiny_model: Path, tmp_path: Path
) -> None:
    engine, lm = start(), load_language_model(tiny_model)
    for seed in range(3):
        engine.train_step(make_batch(seed), 1e-2)
    base, merged_lm = sampled_by(lm, make_batch(7, version=3)), load_language_model(tiny_model)
    merged_lm.load_state_dict(written(engine, tmp_path / "merged"), strict=False)
    batch = sampled_by(merged_lm, make_batch(7, version=3))
    stats = engine.train_step(batch, 0.0)
    assert stats.logprob_gap_fresh < 0.05 and stats.ess > 0.99
    assert engine.train_step(base, 0.0).logprob_gap_fresh > 0.5, "the adapters say nothing"
    assert engine.logprob_gap_at(batch.traces[0], 3, tmp_path / "merged") < 0.05
    assert engine.logprob_gap_at(base.traces[0], 3, tmp_path / "merged") > 0.5


def test_adapters_learn_a_sequence_by_heart(start: StartEngine) -> None:
    engine, batch = start(), demonstrations(make_batch(traces=2))
    losses = [engine.train_step(batch, 1e-2).loss for _ in range(8)]
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_a_resumed_engine_goes_on_bit_for_bit(
    start: StartEngine, tmp_path: Path, zero_stage: int
) -> None:
    objective = Objective(**dict(GAE) | {"reference": KL.reference})
    engine, resumed = (
        start(zero_stage=zero_stage, objective=objective, seed=seed) for seed in (0, 1)
    )
    for seed in range(2):
        engine.train_step(make_batch(seed, version=1 + seed), 1e-2)
    engine.save(tmp_path / "checkpoint", {"cursor": 7})
    resumed.train_step(make_batch(9), 1e-2)  # leaves nothing behind
    assert resumed.load(tmp_path / "checkpoint") == {"cursor": 7}
    seen = []
    for each in (engine, resumed):
        first = each.write_weights(tmp_path / "weights")
        stats = each.train_step(make_batch(2, version=3), 1e-2)
        seen.append(
            (
                first,
                stats.loss,
                stats.value_error,
                stats.reference_kl,
                each.write_weights(tmp_path / "weights"),
            )
        )
    assert seen[0] == seen[1] and seen[0][0] != seen[0][-1]


def test_a_checkpoint_holds_the_adapters_and_no_base(start: StartEngine, tmp_path: Path) -> None:
    engine = start()
    engine.train_step(make_batch(), 1e-2)
    engine.save(tmp_path, {})
    (file,) = tmp_path.glob("*.safetensors")
    tensors = {name: tensor for name, tensor in load_file(file).items() if name != "torch_rng"}
    assert sum(tensor.numel() for tensor in tensors.values()) == 3 * LAYERS * RANK * sum(
        SIDES.values()
    )
    assert {name.split(".")[0] for name in tensors} == {"master", "exp_avg", "exp_avg_sq"}


def test_the_reference_is_the_merged_policy_at_the_start_of_rl(start: StartEngine) -> None:
    engine = start(objective=KL)
    engine.train_step(demonstrations(make_batch()), 1e-2)
    kls = [
        engine.train_step(make_batch(seed, version=1 + seed), 1e-2).reference_kl
        for seed in range(3)
    ]
    assert kls[0] < 1e-3 < 1e-2 < min(kls[1:])


@pytest.mark.parametrize(("saved", "resumed"), [(4, 0), (0, 4), (4, 8)])
def test_a_checkpoint_of_another_rank_is_refused(
    start: StartEngine, tmp_path: Path, saved: int, resumed: int
) -> None:
    start(lora_rank=saved).save(tmp_path, {})
    with pytest.raises(
        CheckpointError,
        match=r"of another model, lora\.rank or learner\.backend: .* tensors differ",
    ):
        start(lora_rank=resumed).load(tmp_path)


def test_adapters_beside_another_base_are_refused(start: StartEngine, tmp_path: Path) -> None:
    start().save(tmp_path / "checkpoint", {})
    other = make_tiny_model(tmp_path / "other", seed=1)
    with pytest.raises(CheckpointError, match="stand beside other weights"):
        start(model_dir=other).load(tmp_path / "checkpoint")


def test_a_model_without_linear_layers_is_refused() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    lm: Any = GPT2LMHeadModel
    with pytest.raises(
        ConfigError, match=r"lora\.rank is 4 but GPT2LMHeadModel is not made of linear layers"
    ):
        add_adapters(
            lm(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=1, n_head=2)), RANK
        )


def test_without_peft_the_cure_is_named(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingDependency, match="pip install peft"):
        add_adapters(load_language_model(tiny_model), RANK)
