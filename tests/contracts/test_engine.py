"""What holds for every learner engine: the same batches in the same order make the same weights, and only they do."""

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from threading import Event, Timer

import pytest
import torch
from safetensors.torch import load_file

from horizonrl.broker.weights.frames import digest_file
from horizonrl.common.config.schema import LearnerSection
from horizonrl.common.errors import CheckpointError, ConfigError
from horizonrl.learner.algorithm.batch import Batch
from horizonrl.learner.engine.api import EngineSettings, RankEngine
from horizonrl.learner.engine.checkpoint import weights_file
from horizonrl.learner.engine.registry import BACKENDS, make_engine
from tests.learner.engines import DEEPSPEED
from tests.learner.traces import demonstrations, make_batch

MARKS = {"deepspeed": DEEPSPEED}
"""Marks of a backend that not every machine can run."""
ENGINES = [pytest.param(name, marks=MARKS.get(name, ())) for name in BACKENDS]
"""Every backend that is registered."""
MODELS = [pytest.param(name, marks=MARKS.get(name, ())) for name in BACKENDS if name != "hash"]
"""Those that train a model."""

Start = Callable[[], RankEngine]


@pytest.fixture(scope="module", params=ENGINES)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def start(backend: str, tiny_models: tuple[Path, Path]) -> Iterator[Start]:
    """Start engines of the backend on the same model; all are closed afterwards."""
    engines: list[RankEngine] = []

    def start_engine() -> RankEngine:
        engines.append(make_engine(EngineSettings(tiny_models[0], backend=backend)))
        return engines[-1]

    yield start_engine
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def engine(backend: str, tiny_models: tuple[Path, Path]) -> Iterator[RankEngine]:
    """One engine, for tests to which it does not matter what it was trained on before."""
    shared = make_engine(EngineSettings(tiny_models[0], backend=backend))
    yield shared
    shared.close()


def digests(engine: RankEngine, batches: list[Batch], path: Path) -> list[str]:
    """Train on the batches, each as the next version; return the digests of the versions that they make."""
    made = []
    for batch in batches:
        engine.train_step(batch, 1e-3)
        made.append(engine.write_weights(path))
    return made


def test_the_default_backend_is_registered_and_an_unknown_one_is_refused(tmp_path: Path) -> None:
    assert LearnerSection().backend in BACKENDS
    known = f"choose {', '.join(BACKENDS)}, or MODULE:FUNCTION .*did you mean deepspeed"
    with pytest.raises(ConfigError, match=known):
        make_engine(EngineSettings(tmp_path, backend="deepsped"))


def test_the_same_batches_make_the_same_versions_and_another_order_makes_others(
    start: Start, tmp_path: Path
) -> None:
    batches = [make_batch(0), demonstrations(make_batch(1)), make_batch(2)]
    first, again, other = (
        digests(start(), order, tmp_path / "weights") for order in (batches, batches, batches[::-1])
    )
    assert first == again and len(set(first)) == 3
    assert other[-1] != first[-1]


def test_a_step_says_what_it_trained(engine: RankEngine) -> None:
    stats = engine.train_step(make_batch(), 1e-3)
    assert (stats.trained_tokens, stats.lr) == (make_batch().trained_tokens, 1e-3)
    assert math.isfinite(stats.loss) and math.isfinite(stats.grad_norm) and stats.compute_s > 0


def test_a_batch_without_trained_tokens_is_refused_and_changes_nothing(
    engine: RankEngine, tmp_path: Path
) -> None:
    before = engine.write_weights(tmp_path / "weights")
    with pytest.raises(ValueError, match="without trained tokens"):
        engine.train_step(Batch((), 0), 1e-3)
    assert engine.write_weights(tmp_path / "weights") == before


def test_the_digest_is_that_of_the_one_file_that_is_written(
    engine: RankEngine, tmp_path: Path
) -> None:
    digest = engine.write_weights(tmp_path / "weights")
    assert digest == digest_file(tmp_path / "weights")
    assert [path.name for path in tmp_path.iterdir()] == ["weights"]
    assert engine.write_weights(tmp_path / "again") == digest


def test_a_version_is_written_as_it_was_while_the_next_batch_trains(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = digests(start(), [make_batch(0), make_batch(1)], tmp_path / "weights")
    engine, released, write = start(), Event(), weights_file.write_weights_file

    def write_slowly(tensors: Mapping[str, torch.Tensor], path: Path) -> str:
        released.wait(5.0)
        return write(tensors, path)

    monkeypatch.setattr("horizonrl.learner.engine.model.lora.write_weights_file", write_slowly)
    engine.train_step(make_batch(0), 1e-3)
    writing = engine.begin_write_weights(tmp_path / "first")
    Timer(0.3, released.set).start()
    engine.train_step(make_batch(1), 1e-3)
    assert engine.begin_write_weights(tmp_path / "second").result() == second
    assert writing.result() == first == digest_file(tmp_path / "first")


@pytest.mark.parametrize("backend", MODELS, indirect=True)
def test_the_file_has_the_names_shapes_and_precision_of_the_model(
    start: Start, tiny_models: tuple[Path, Path], tmp_path: Path
) -> None:
    engine, original = start(), load_file(tiny_models[0] / "model.safetensors")
    engine.write_weights(tmp_path / "weights")
    first = load_file(tmp_path / "weights")
    assert first.keys() == original.keys()
    assert all(torch.equal(first[name], original[name]) for name in original)
    engine.train_step(make_batch(), 1e-3)
    engine.write_weights(tmp_path / "weights")
    written = load_file(tmp_path / "weights")
    assert {name: tensor.shape for name, tensor in written.items()} == {
        n: t.shape for n, t in original.items()
    }
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}


@pytest.mark.parametrize("steps", [0, 2])
def test_a_resumed_engine_goes_on_exactly(start: Start, tmp_path: Path, steps: int) -> None:
    engine, resumed = start(), start()
    digests(engine, [make_batch(seed) for seed in range(steps)], tmp_path / "weights")
    saved = engine.write_weights(tmp_path / "weights")
    engine.save(tmp_path / "checkpoint", {"cursor": 7})
    resumed.train_step(make_batch(9), 1e-3)  # leaves nothing behind
    assert resumed.load(tmp_path / "checkpoint") == {"cursor": 7}
    assert resumed.write_weights(tmp_path / "weights") == saved
    rest = [make_batch(seed) for seed in (3, 4)]
    assert digests(resumed, rest, tmp_path / "weights") == digests(
        engine, rest, tmp_path / "weights"
    )


def test_a_directory_without_a_checkpoint_is_refused(engine: RankEngine, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="checkpoint"):
        engine.load(tmp_path)


def test_the_gap_at_an_earlier_version_is_measured_without_touching_the_weights(
    engine: RankEngine, tmp_path: Path
) -> None:
    trace = make_batch(version=1).traces[0]
    engine.write_weights(tmp_path / "v1")
    before = digests(engine, [make_batch(0)], tmp_path / "weights")[0]
    gap = engine.logprob_gap_at(trace, 1, tmp_path / "v1")
    assert 0 <= gap < math.inf
    assert engine.write_weights(tmp_path / "weights") == before


def test_an_engine_that_is_alone_leads_and_knows_its_vocabulary(engine: RankEngine) -> None:
    assert (engine.rank, engine.ranks, engine.vocabulary) == (0, 1, 512)


def test_after_one_engine_is_closed_another_makes_the_same_weights(
    backend: str, tiny_models: tuple[Path, Path], tmp_path: Path
) -> None:
    made = []
    for _ in range(2):
        engine = make_engine(EngineSettings(tiny_models[0], backend=backend))
        made += digests(engine, [make_batch()], tmp_path / "weights")
        engine.close()
    assert made[0] == made[1]
