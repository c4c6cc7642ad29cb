"""Checkpoints: at every stage a resumed engine goes on bit for bit, and what does not fit is refused."""

import json
from pathlib import Path
from threading import Event, Timer
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from horizonrl.common.config.objective import Objective, ReferenceSection
from horizonrl.common.errors import CheckpointError
from horizonrl.learner.engine.checkpoint import shards
from tests.learner.engines import DEEPSPEED, RETURNS, StartEngine
from tests.learner.sections import make_advantage
from tests.learner.traces import make_batch

pytestmark = DEEPSPEED

GAE = Objective(advantage=make_advantage(kind="gae", critic_lr=1e-2))
KL = Objective(advantage=RETURNS.advantage, reference=ReferenceSection(kl=0.1))


def files_of(checkpoint: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in checkpoint.iterdir()}


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_the_critic_learns_and_its_state_is_resumed_bit_for_bit(
    start: StartEngine, tmp_path: Path, zero_stage: int
) -> None:
    engine, resumed = (start(zero_stage=zero_stage, objective=GAE) for _ in range(2))
    errors = [engine.train_step(make_batch(), 0.0).value_error for _ in range(6)]
    assert errors[-1] < 0.7 * errors[0]
    engine.train_step(make_batch(0), 1e-3)
    engine.save(tmp_path / "checkpoint", {})
    resumed.train_step(make_batch(7), 1e-3)
    resumed.load(tmp_path / "checkpoint")
    seen = []
    for each in (engine, resumed):
        first = each.write_weights(tmp_path / "weights")
        stats = each.train_step(make_batch(1), 1e-3)
        figures = (stats.value_error, stats.loss)
        seen.append((first, *figures, each.write_weights(tmp_path / "weights")))
    assert seen[0] == seen[1] and seen[0][0] != seen[0][-1]


def test_the_reference_is_resumed_bit_for_bit(start: StartEngine, tmp_path: Path) -> None:
    engine, resumed = start(objective=KL), start(objective=KL)
    for seed in (0, 1):
        engine.train_step(make_batch(seed), 1e-2)
    engine.save(tmp_path / "checkpoint", {})
    resumed.load(tmp_path / "checkpoint")
    kls = {each.train_step(make_batch(2), 1e-2).reference_kl for each in (engine, resumed)}
    assert len(kls) == 1 and min(kls) > 1e-3


def test_a_checkpoint_of_imitation_does_not_find_the_reference_of_rl(
    start: StartEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, slow, written = start(objective=KL), Event(), shards.write_shards

    def write_slowly(*given: Any) -> list[str]:
        slow.wait(5.0)
        return written(*given)

    monkeypatch.setattr("horizonrl.learner.engine.step.write_shards", write_slowly)
    saving = engine.begin_save(tmp_path / "checkpoint", {})
    Timer(0.5, slow.set).start()
    engine.train_step(make_batch(), 1e-2)
    saving.result()
    assert "reference_version" not in json.loads(
        (tmp_path / "checkpoint" / "engine.json").read_text()
    )


def test_a_checkpoint_without_the_critic_names_the_key(start: StartEngine, tmp_path: Path) -> None:
    plain, with_critic = start(), start(objective=GAE)
    plain.save(tmp_path / "plain", {})
    with pytest.raises(
        CheckpointError, match=r"has no critic, but advantage\.kind now asks for one"
    ):
        with_critic.load(tmp_path / "plain")
    with_critic.save(tmp_path / "critic", {})
    with pytest.raises(
        CheckpointError, match=r"has a critic, and advantage\.kind now asks for none"
    ):
        plain.load(tmp_path / "critic")


def test_a_checkpoint_of_one_stage_resumes_at_any_other(start: StartEngine, tmp_path: Path) -> None:
    engines = [start(zero_stage=zero_stage) for zero_stage in (1, 2, 3, 0)]
    engines[0].train_step(make_batch(0), 1e-3)
    engines[0].save(tmp_path / "0", {})
    for index, engine in enumerate(engines[1:]):
        engine.load(tmp_path / f"{index}")
        engine.save(tmp_path / f"{index + 1}", {})
    assert files_of(tmp_path / "3") == files_of(tmp_path / "0")
    assert len({engine.write_weights(tmp_path / "weights") for engine in engines}) == 1
    norms = [engine.train_step(make_batch(1), 1e-3).grad_norm for engine in engines]
    assert norms == pytest.approx([norms[0]] * 4, rel=1e-2)


def test_a_checkpoint_from_before_the_first_step_can_be_loaded(
    start: StartEngine, tmp_path: Path
) -> None:
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
    tensors = {
        name: tensor for file in files[1:] for name, tensor in load_file(tmp_path / file).items()
    }
    master, moment = (tensors[f"{kind}.model.norm.weight"] for kind in ("master", "exp_avg_sq"))
    assert (
        master.dtype == moment.dtype == torch.float32
        and master.shape == (128,)
        and moment.min() > 0
    )
    start().load(tmp_path)


def test_a_checkpoint_of_another_model_is_refused_by_name(
    start: StartEngine, tmp_path: Path
) -> None:
    engine = start()
    engine.save(tmp_path, {})
    (file,) = tmp_path.glob("*.safetensors")
    tensors = load_file(file)
    save_file({**tensors, "exp_avg.model.norm.weight": torch.zeros(127)}, file)
    with pytest.raises(
        CheckpointError,
        match=r"exp_avg\.model\.norm\.weight, of shape \[127\] there and \[128\] here",
    ):
        engine.load(tmp_path)
    save_file({**tensors, "master.model.extra": torch.zeros(3)}, file)
    with pytest.raises(
        CheckpointError, match=r"master\.model\.extra, of shape \[3\] there and none here"
    ):
        engine.load(tmp_path)


def test_a_damaged_checkpoint_is_refused(start: StartEngine, tmp_path: Path) -> None:
    engine = start()
    engine.save(tmp_path, {})
    (file,) = tmp_path.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="earlier checkpoint"):
        engine.load(tmp_path)
