"""DeepSpeed at every stage, alone in this process: each takes the step that plain torch takes."""

import json
import shutil
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import pytest
import torch

from horizonrl.learner.algorithm.batch import Batch
from horizonrl.learner.engine import backends
from horizonrl.learner.engine.api import EngineSettings
from horizonrl.learner.engine.model.model import load_language_model
from tests.learner.engine.test_ranks import KL
from tests.learner.engines import DEEPSPEED, StartEngine, cosine, weights_of
from tests.learner.traces import make_batch, make_groups

pytestmark = DEEPSPEED


def reference_step(model_dir: Path, batch: Batch, lr: float) -> tuple[float, float, torch.Tensor]:
    """Take the step in plain torch: float32 throughout, one unpadded row at a time, the loss written out."""
    lm: Any = load_language_model(model_dir).float()
    loss = torch.zeros(())
    for trace in batch.traces:
        ids_L = torch.from_numpy(trace.ids_L.astype(np.int64))
        scores_LV = lm(input_ids=ids_L[None]).logits[0].log_softmax(-1)
        for index in np.flatnonzero(trace.mask_L):
            A = float(trace.rewards_L.sum())
            r = (scores_LV[index - 1, ids_L[index]] - float(trace.logprobs_L[index])).exp()
            surrogate = torch.minimum(r * A, r.clamp(0.8, 1.28) * A)
            loss = loss - (torch.maximum(surrogate, torch.tensor(3 * A)) if A < 0 else surrogate)
    loss = loss / batch.trained_tokens
    loss.backward()
    grad_norm = torch.nn.utils.clip_grad_norm_(lm.parameters(), 1.0)
    torch.optim.AdamW(lm.parameters(), lr=lr, weight_decay=0.0).step()
    named = sorted(lm.named_parameters())
    return (
        loss.item(),
        float(grad_norm),
        torch.cat([parameter.detach().flatten() for _, parameter in named]),
    )


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_a_step_equals_plain_torch(
    start: StartEngine, tiny_model: Path, tmp_path: Path, zero_stage: int
) -> None:
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


def test_at_stage_0_too_updates_that_are_too_small_for_bfloat16_add_up(
    start: StartEngine, tmp_path: Path
) -> None:
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


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_gradients_are_freed_as_they_come_and_the_weights_are_those_of_gradients_that_wait(
    start: StartEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zero_stage: int
) -> None:
    configured = backends.deepspeed._deepspeed_config
    digests, waiting = [], []
    for precision in ({"enabled": True}, configured(EngineSettings(tmp_path))["bf16"]):
        monkeypatch.setattr(
            backends.deepspeed,
            "_deepspeed_config",
            lambda settings, precision=precision: configured(settings) | {"bf16": precision},
        )
        engine: Any = start(zero_stage=zero_stage, micro_batch_tokens=128)
        backward = engine._backend.backward

        def count(loss: torch.Tensor, engine: Any = engine, backward: Any = backward) -> None:
            backward(loss)
            waiting.append(any(p.grad is not None for p in engine._backend.scorer.parameters()))

        engine._backend.backward = count
        for seed in range(3):
            engine.train_step(make_batch(seed, traces=7), 1e-3)
        digests.append(engine.write_weights(tmp_path / "weights"))
    assert digests[0] == digests[1]
    assert len(waiting) >= 2 * 3 * 2
    if zero_stage == 1:
        half = len(waiting) // 2
        assert all(waiting[:half]) and not any(waiting[half:])


def test_the_step_does_not_depend_on_sharing_prompts(start: StartEngine, tmp_path: Path) -> None:
    batch = make_groups(0, groups=2, group_size=4, prompt=100)
    sharing, plain = start(zero_stage=1), start(zero_stage=3)  # stage 3 never shares
    before = weights_of(plain, tmp_path / "before")
    stats, stats_plain = sharing.train_step(batch, 1e-2), plain.train_step(batch, 1e-2)
    for name in ("loss", "grad_norm", "entropy", "kl", "logprob_gap", "importance_mean", "ess"):
        assert getattr(stats, name) == pytest.approx(
            getattr(stats_plain, name), rel=1e-2, abs=1e-3
        ), name
    deltas = [weights_of(engine, tmp_path / "after") - before for engine in (sharing, plain)]
    assert cosine(*deltas) > 0.98


def test_at_stage_3_the_model_is_partitioned_before_deepspeed_moves_it_to_the_device(
    start: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    initialize, elements = deepspeed.initialize, []

    def spy(model: torch.nn.Module, **settings: Any) -> Any:
        elements.append(sum(parameter.numel() for parameter in model.parameters()))
        return initialize(model=model, **settings)

    monkeypatch.setattr(deepspeed, "initialize", spy)
    for zero_stage in (2, 3):
        engine = start(zero_stage=zero_stage, objective=KL)
        engine.train_step(make_batch(), 1e-3)
    policy_2, policy_3, reference_3 = elements
    assert policy_2 > 0 and policy_3 == reference_3 == 0


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_gradient_checkpointing_changes_only_the_memory(
    start: StartEngine, tiny_model: Path, tmp_path: Path, zero_stage: int
) -> None:
    with_dropout = shutil.copytree(tiny_model, tmp_path / "model")
    config = json.loads((tiny_model / "config.json").read_text())
    (with_dropout / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.5}))
    settings = {"model_dir": with_dropout, "zero_stage": zero_stage}
    engines = [
        start(gradient_checkpointing=checkpointing, **settings) for checkpointing in (False, True)
    ]
    plain, checkpointed = (engine.train_step(make_batch(), 1e-3) for engine in engines)
    assert checkpointed.logprob_gap == pytest.approx(plain.logprob_gap, rel=1e-6)
    assert checkpointed.grad_norm == pytest.approx(plain.grad_norm, rel=1e-3)
