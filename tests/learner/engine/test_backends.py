"""The backends beside each other: how closely they agree, what passes from one to another, and what is refused."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from horizonrl.common.config.objective import Objective, ReferenceSection
from horizonrl.common.config.schema import RunConfig
from horizonrl.common.config.training import LearnerSection
from horizonrl.common.errors import CheckpointError, ConfigError, MissingDependency
from horizonrl.learner.algorithm.batch import Batch
from horizonrl.learner.engine.api import EngineSettings
from horizonrl.learner.engine.registry import BACKENDS, SEVERAL_RANKS, make_engine, require_backend
from tests.learner.engines import StartEngine, on_deepspeed, weights_of
from tests.learner.sections import make_advantage, make_loss
from tests.learner.traces import demonstrations, make_batch, make_groups

ALL_MODELS = Objective(
    advantage=make_advantage(kind="gae", critic_lr=1e-2), reference=ReferenceSection(kl=0.1)
)
EQUAL: dict[str, dict[str, Any]] = {
    "plain": {},
    "several micro-batches": {"micro_batch_tokens": 128},
    "adapters": {"lora_rank": 4},
    "several updates": {"objective": Objective(loss=make_loss(minibatches=2))},
    "scores before the step": {"objective": Objective(advantage=make_advantage(kind="otb"))},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "betas": {"betas": (0.8, 0.95)},
}
CLOSE: dict[str, dict[str, Any]] = {
    "stage 0": {"zero_stage": 0},
    "critic and reference": {"objective": ALL_MODELS},
    "weight decay": {"weight_decay": 0.1, "max_grad_norm": 0.1},
}
"""Stage 0 adds micro-batches up in bfloat16. With two groups, or with decay, some figures differ in the last bit of
float32, and AdamW turns a gradient's sign into a whole step."""


def batches() -> list[Batch]:
    rl = [make_batch(0), make_groups(1, groups=3, group_size=4, prompt=60), make_batch(2)]
    return [
        demonstrations(make_batch(9)),
        *(replace(batch, version=1 + index) for index, batch in enumerate(rl)),
    ]


@on_deepspeed
@pytest.mark.parametrize("layout", EQUAL)
def test_torch_and_stage_1_on_one_cpu_rank_are_equal_bit_for_bit(
    start: StartEngine, tmp_path: Path, layout: str
) -> None:
    """Weights, figures and checkpoints: so a run's digests do not depend on which of the two has trained it."""
    engines = [start(backend=backend, **EQUAL[layout]) for backend in ("torch", "deepspeed")]
    for batch in batches():
        first, second = (engine.train_step(batch, 1e-3) for engine in engines)
        # NaN is not equal to itself.
        assert repr(replace(first, compute_s=0)) == repr(replace(second, compute_s=0))
        assert len({engine.write_weights(tmp_path / "weights") for engine in engines}) == 1
    for index, engine in enumerate(engines):
        engine.save(tmp_path / str(index), {})
    saved = [
        {path.name: path.read_bytes() for path in (tmp_path / str(index)).iterdir()}
        for index in range(2)
    ]
    assert saved[0] == saved[1]


@on_deepspeed
@pytest.mark.parametrize("layout", CLOSE)
def test_torch_and_deepspeed_take_nearly_the_same_steps(
    start: StartEngine, tmp_path: Path, layout: str
) -> None:
    settings = CLOSE[layout]
    engines = [
        start(backend="torch", **{**settings, "zero_stage": 1}),
        start(backend="deepspeed", **settings),
    ]
    before = weights_of(engines[0], tmp_path / "weights")
    for batch in batches():
        stats = [engine.train_step(batch, 1e-3) for engine in engines]
        assert stats[1].loss == pytest.approx(stats[0].loss, rel=1e-2, abs=1e-3)
        assert stats[1].grad_norm == pytest.approx(stats[0].grad_norm, rel=2e-2)
    deltas = [weights_of(engine, tmp_path / "weights") - before for engine in engines]
    assert float(torch.nn.functional.cosine_similarity(*deltas, dim=0)) > 0.99


@on_deepspeed
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_a_run_may_change_its_backend_at_a_checkpoint(
    start: StartEngine, tmp_path: Path, zero_stage: int
) -> None:
    engines = [start(zero_stage=zero_stage), start(backend="torch"), start(zero_stage=zero_stage)]
    engines[0].train_step(make_batch(0), 1e-3)
    engines[0].save(tmp_path / "0", {"cursor": 7})
    for index, engine in enumerate(engines[1:]):
        assert engine.load(tmp_path / f"{index}") == {"cursor": 7}
        engine.save(tmp_path / f"{index + 1}", {"cursor": 7})
    files = [
        {path.name: path.read_bytes() for path in (tmp_path / f"{index}").iterdir()}
        for index in range(3)
    ]
    assert files[0] == files[1] == files[2]
    assert len({engine.write_weights(tmp_path / "weights") for engine in engines}) == 1
    losses = [engine.train_step(make_batch(1), 1e-3).loss for engine in engines]
    assert losses[0] == losses[2] and losses[1] == pytest.approx(losses[0], rel=1e-2)


def test_a_checkpoint_without_a_model_and_one_of_a_model_do_not_mix(
    start: StartEngine, tmp_path: Path
) -> None:
    engines = {backend: start(backend=backend) for backend in ("hash", "torch")}
    for backend, engine in engines.items():
        engine.save(tmp_path / backend, {})
    with pytest.raises(CheckpointError, match="no engine's checkpoint"):
        engines["torch"].load(tmp_path / "hash")
    with pytest.raises(CheckpointError, match=r"learner\.backend = hash.* resume with the backend"):
        engines["hash"].load(tmp_path / "torch")


def test_torch_trains_where_deepspeed_is_not_installed(
    start: StartEngine, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    assert start(backend="torch").train_step(make_batch(), 1e-3).grad_norm > 0
    with pytest.raises(
        MissingDependency, match=r"pip install deepspeed, or set learner\.backend to torch"
    ):
        make_engine(EngineSettings(tiny_model))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["torch", "--learner.zero_stage=3"],
            r"learner\.zero_stage is 3 but .* has no ZeRO stages",
        ),
        (
            ["hash"],
            r"actor\.engine is vllm, which needs the weights of a model: set actor\.engine to scripted",
        ),
    ],
)
def test_invalid_combinations_are_refused_before_anything_starts(
    overrides: list[str], message: str
) -> None:
    backend, *more = overrides
    with pytest.raises(ConfigError, match=message):
        RunConfig.load([], [f"--learner.backend={backend}", *more])


def test_a_backend_of_another_package_that_returns_no_engine_is_named(tiny_model: Path) -> None:
    backend = f"{__name__}:returns_nothing"
    with pytest.raises(ConfigError, match=rf"{backend} returned None: return an engine \(.*\.py:"):
        make_engine(EngineSettings(tiny_model, backend=backend))


def returns_nothing(settings: EngineSettings) -> None: ...


@pytest.mark.parametrize("setting", [{"ranks": 2}, {"nodes": 2, "rendezvous": "10.0.0.1:29400"}])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_in_one_process_is_refused_with_several_ranks(
    backend: str, setting: dict[str, Any]
) -> None:
    require_backend(LearnerSection(backend=backend))
    if backend in SEVERAL_RANKS:
        require_backend(LearnerSection(backend=backend, **setting))
        return
    with pytest.raises(
        ConfigError,
        match=rf"learner\.backend is {backend}, which runs in one process: set both to 1",
    ):
        require_backend(LearnerSection(backend=backend, **setting))


def test_the_hash_goes_with_scripted_actors() -> None:
    config = RunConfig.load([], ["--learner.backend=hash", "--actor.engine=scripted"])
    assert config.learner.backend == "hash"
