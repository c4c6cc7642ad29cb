"""One rank and two ranks make the same step; a rank that dies ends the others."""

import shutil
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from horizonrl.common.config.objective import Objective, ReferenceSection
from horizonrl.learner.algorithm.batch import Batch, Trace, traces_of
from horizonrl.learner.engine.api import EngineSettings
from horizonrl.learner.engine.model.packing import pack
from horizonrl.learner.engine.ranks import decode_batch, encode_batch
from horizonrl.learner.engine.registry import make_engine
from tests.learner.branching import branching_group
from tests.learner.engines import DEEPSPEED
from tests.learner.ranks_program import (
    CHUNK,
    FIGURES,
    HEADS,
    resume,
    run_program,
    train,
    uneven_batches,
)
from tests.learner.traces import make_batch
from tests.namespaces import two_machines

pytestmark = [pytest.mark.timeout(600), *(mark for mark in DEEPSPEED if mark.name != "process")]

KL = Objective(reference=ReferenceSection(kl=0.1))


def flat(path: Path) -> torch.Tensor:
    return torch.cat([tensor.flatten().float() for _, tensor in sorted(load_file(path).items())])


@given(st.integers(0, 1000), st.integers(0, 6))
def test_a_batch_crosses_to_the_other_ranks_bit_for_bit(seed: int, traces: int) -> None:
    branched = [
        trace for episode in branching_group(seed).episodes for trace in traces_of(episode, 9)
    ]
    batch = Batch((*make_batch(seed, traces=traces).traces, *branched), 1)
    received = decode_batch(encode_batch(batch))
    assert received.version == batch.version
    for sent, got in zip(batch.traces, received.traces, strict=True):
        for name in (field.name for field in fields(Trace)):
            mine, theirs = np.asarray(getattr(sent, name)), np.asarray(getattr(got, name))
            assert (mine.dtype, mine.tobytes()) == (theirs.dtype, theirs.tobytes())


def make_odd_model(path: Path) -> Path:
    """Make a model whose norms no two ranks can cut into equal parts."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 512, "hidden_size": 33, "intermediate_size": 65, "num_hidden_layers": 2}
    config = LlamaConfig(
        **sizes, num_attention_heads=3, head_dim=32, tie_word_embeddings=True, dtype="bfloat16"
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return path


def make_headed_model(path: Path, *, tied: bool) -> None:
    """Make a model whose head is its embeddings, or one whose head has its own weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=2, tie_word_embeddings=tied, dtype="bfloat16")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)


@dataclass(frozen=True, slots=True)
class Trained:
    """What the program's mode `train` printed on rank 0, and where it left its files."""

    figures: dict[str, Any]
    directory: Path

    @property
    def weights(self) -> torch.Tensor:
        return flat(self.directory / "weights.safetensors")


@pytest.fixture(scope="module")
def alone(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Trained]:
    """One rank, at stage 1: without adapters, and with some of rank 4."""
    return {
        rank: train_alone(tiny_model, tmp_path_factory.mktemp("alone"), lora_rank=rank)
        for rank in (0, 4)
    }


def train_alone(model_dir: Path, directory: Path, lora_rank: int = 0) -> Trained:
    settings = EngineSettings(model_dir, micro_batch_tokens=128, objective=KL, lora_rank=lora_rank)
    return Trained(train(make_engine(settings), directory), directory)


@dataclass(frozen=True, slots=True)
class Stages:
    """What two processes did one after the other, at each stage and with adapters; rank 0 prints what is in `said`."""

    said: dict[str, Any]
    directory: Path
    odd: Trained
    """One rank's steps with the odd model, whose checkpoint two ranks have resumed from."""

    def trained(self, name: str) -> Trained:
        return Trained(self.said[name], self.directory / name)


@pytest.fixture(scope="module")
def stages(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Stages:
    directory = tmp_path_factory.mktemp("together")
    (directory / "odd").mkdir()
    odd = train_alone(make_odd_model(directory / "odd-model"), directory / "odd")
    for head in HEADS:
        make_headed_model(directory / head, tied=head == "tied")
    leader, follower = run_program("stages", tiny_model, directory, ranks=2)
    assert (leader["rc"], follower["rc"]) == (0, 0), (leader, follower)
    return Stages(leader, directory, odd)


def assert_same_steps(
    alone: Trained, together: Trained, model_dir: Path, close: float = 1e-3
) -> None:
    figures = together.figures
    assert figures["trained_tokens"] == alone.figures["trained_tokens"]
    for name in ("loss", "grad_norm", "ess", "reference_kl"):
        assert figures[name][0] == pytest.approx(alone.figures[name][0], rel=close, nan_ok=True), (
            name
        )
        assert figures[name] == pytest.approx(
            alone.figures[name], rel=5e-2, abs=2e-3, nan_ok=True
        ), name
    before = flat(model_dir / "model.safetensors")
    deltas = (alone.weights - before, together.weights - before)
    assert float(torch.nn.functional.cosine_similarity(*deltas, dim=0)) > 0.95
    assert figures["state"] == {"cursor": 3}
    assert figures["repeats"], "a step after `load` made other weights than before"


@pytest.mark.process
@pytest.mark.parametrize("stage", ["1", "2", "3", "adapters"])
def test_two_ranks_make_the_steps_of_one(
    stage: str, alone: dict[int, Trained], stages: Stages, tiny_model: Path
) -> None:
    expected = alone[4 if stage == "adapters" else 0]
    assert_same_steps(expected, stages.trained(stage), tiny_model)


@pytest.mark.process
def test_two_machines_make_the_weights_of_two_ranks_on_one(
    stages: Stages, tiny_model: Path, tmp_path: Path
) -> None:
    """At stage 3, which sends the most."""
    with two_machines() as machines:
        apart, there = run_program("train-z3-k1", tiny_model, tmp_path, 2, machines)
    assert (apart["rc"], there["rc"]) == (0, 0), (apart, there)
    assert apart["repeats"], "a step after `load` made other weights than before"
    assert apart["digest"] == stages.said["3"]["digest"]
    assert apart["grad_norm"] == stages.said["3"]["grad_norm"]


@pytest.mark.slow
@pytest.mark.process
def test_two_ranks_make_the_updates_of_one_with_a_critic(tiny_model: Path, tmp_path: Path) -> None:
    trained = []
    for ranks in (1, 2):
        (tmp_path / str(ranks)).mkdir()
        figures, *others = run_program(
            "train-z3-u2", tiny_model, tmp_path / str(ranks), ranks=ranks
        )
        assert all(rank["rc"] == 0 for rank in (figures, *others)), (figures, others)
        trained.append(Trained(figures, tmp_path / str(ranks)))
    # The first figures already hold a second update, after a step of bfloat16 weights.
    assert_same_steps(*trained, tiny_model, close=3e-2)


@pytest.mark.process
def test_ranks_with_other_numbers_of_chunks_take_part_in_the_same_collectives(
    stages: Stages,
) -> None:
    """In the steps, in the scoring pass of policy and critic, and in that of the reference."""
    plans = [pack(batch.traces, 2, 128) for batch in uneven_batches()]
    tokens = [[len(micro_batch.trained_N) for (micro_batch,) in plan] for plan in plans]
    assert [sorted(-(-each // CHUNK) for each in both) for both in tokens] == [[2, 5], [0, 5]]
    for head in HEADS:
        first, third = (stages.said[head][stage] for stage in "13")
        for name in FIGURES:
            assert third[name] == pytest.approx(first[name], rel=1e-4, nan_ok=True), (head, name)
        made = stages.directory / f"{head}-steps"
        weights = [load_file(made / stage / "weights.safetensors") for stage in "13"]
        names = set(load_file(stages.directory / head / "model.safetensors"))
        assert set(weights[0]) == set(weights[1]) == names, "the head has no second name"


def assert_resumed(first: Trained, resumed: dict[str, Any], directory: Path) -> None:
    """The state came whole through other ranks, the parameters are its masters, and the next step is the same."""
    for file in (first.directory / "checkpoint").iterdir():
        assert file.read_bytes() == (directory / "again" / file.name).read_bytes(), file.name
    state = load_file(directory / "again" / "training-00000.safetensors")
    loaded = load_file(directory / "loaded.safetensors")
    assert all(
        torch.equal(tensor, state[f"master.{name}"].to(torch.bfloat16))
        for name, tensor in loaded.items()
    )
    assert len(state) == 3 * len(loaded) + 1
    for name in ("loss", "grad_norm", "reference_kl"):
        assert resumed[name] == pytest.approx(first.figures[name][2], rel=1e-2), name
    before = flat(directory / "loaded.safetensors")
    deltas = (first.weights - before, flat(directory / "resumed.safetensors") - before)
    assert float(torch.nn.functional.cosine_similarity(*deltas, dim=0)) > 0.95


@pytest.mark.process
@pytest.mark.parametrize("stage", "13")
def test_a_checkpoint_of_two_ranks_resumes_on_one(
    stage: str, stages: Stages, tiny_model: Path, tmp_path: Path
) -> None:
    together = stages.trained(stage)
    shutil.copytree(together.directory / "checkpoint", tmp_path / "checkpoint")
    engine = make_engine(
        EngineSettings(tiny_model, zero_stage=2, micro_batch_tokens=128, objective=KL)
    )
    assert_resumed(together, resume(engine, tmp_path), tmp_path)


@pytest.mark.process
def test_adapters_of_two_ranks_resume_on_one(stages: Stages, tiny_model: Path) -> None:
    together = stages.trained("adapters")
    engine = make_engine(
        EngineSettings(tiny_model, zero_stage=2, micro_batch_tokens=128, objective=KL, lora_rank=4)
    )
    engine.load(together.directory / "checkpoint")
    loss = engine.train_step(make_batch(2), 1e-3).loss
    assert loss == pytest.approx(together.figures["loss"][2], rel=1e-2)
    engine.close()


@pytest.mark.process
def test_a_checkpoint_of_one_rank_resumes_on_two(stages: Stages) -> None:
    assert_resumed(stages.odd, stages.said["odd"], stages.directory / "odd")


@pytest.mark.process
def test_a_rank_that_is_gone_ends_the_leader_with_an_error(
    tiny_model: Path, tmp_path: Path
) -> None:
    leader, deserter = run_program("desert", tiny_model, tmp_path, ranks=2)
    assert deserter["rc"] == 7
    assert leader["rc"] == 1, leader
