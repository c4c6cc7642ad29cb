"""A step that does not fit into the GPU: it is computed once more where that changes nothing, and then ends the run."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from horizonrl.common.config.objective import Objective, ReferenceSection
from horizonrl.common.errors import OutOfMemory
from horizonrl.learner.engine import step
from horizonrl.learner.engine.model import frozen
from horizonrl.learner.ranks.spawn import spawn_ranks
from tests.learner.engines import DEEPSPEED, RETURNS, StartEngine
from tests.learner.sections import make_loss
from tests.learner.traces import make_batch

pytestmark = DEEPSPEED

UPDATES = 2
KL = Objective(
    advantage=RETURNS.advantage,
    loss=make_loss(minibatches=UPDATES),
    reference=ReferenceSection(kl=0.1),
)
"""A pass that scores the batch, then two updates."""
MICRO_BATCH_TOKENS = 64


class Memory:
    """Runs out when layer 1 of an engine's model is passed for the given times, counted from 1."""

    def __init__(self, engine: Any, *short_at: int, backward: bool = False) -> None:
        self.passes = 0
        self._short_at = short_at
        layer = engine._backend.scorer.lm.model.layers[1]
        (layer.register_full_backward_hook if backward else layer.register_forward_hook)(
            self._passed
        )

    def _passed(self, *_: Any) -> None:
        self.passes += 1
        if self.passes in self._short_at:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has ..."
            )


def stepped(engine: Any, path: Path) -> str:
    for _ in range(2):
        engine.train_step(make_batch(traces=10), 1e-2)
    return str(engine.write_weights(path))


@pytest.mark.parametrize(("backend", "stage"), [("torch", 1), ("deepspeed", 0), ("deepspeed", 1)])
def test_a_step_that_is_computed_again_is_the_same_step(
    backend: str, stage: int, start: StartEngine, tmp_path: Path
) -> None:
    settings = {
        "backend": backend,
        "zero_stage": stage,
        "objective": KL,
        "micro_batch_tokens": MICRO_BATCH_TOKENS,
    }
    engine = start(**settings)
    passes, backwards = Memory(engine), Memory(engine, backward=True)
    undisturbed = stepped(engine, tmp_path / "undisturbed")
    assert backwards.passes > 2 * 2 * UPDATES, "several micro-batches in each update"
    scored = passes.passes // 2 - backwards.passes // 2
    # In the pass that scores, in the first update and in the last; what is computed again is counted too.
    short_forward, short_backward = (2, scored + 4, passes.passes + 3), (2, backwards.passes + 2)
    for backward, short_at in enumerate((short_forward, short_backward)):
        engine = start(**settings)
        memory = Memory(engine, *short_at, backward=bool(backward))
        assert stepped(engine, tmp_path / str(backward)) == undisturbed
        assert memory.passes > short_at[-1], "it was short each time"


def test_the_second_failure_ends_the_run_and_names_what_helps(start: StartEngine) -> None:
    engine = start(backend="torch", micro_batch_tokens=MICRO_BATCH_TOKENS)
    memory = Memory(engine, 2, 4)
    with pytest.raises(OutOfMemory) as short:
        engine.train_step(make_batch(), 1e-2)
    assert memory.passes == 4
    assert short.value.exit_code == 2
    for said in (
        "the step after version 1 does not fit",
        "(CUDA out of memory. Tried to allocate 2.00 GiB.; torch's peak was 0.0 GB)",
        "learner.gradient_checkpointing (it is false)",
        "learner.micro_batch_tokens (64)",
        "learner.zero_stage (1)",
    ):
        assert said in str(short.value)


def none(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None: ...


def several_ranks(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "ranks", 2)
    monkeypatch.setattr(engine, "_pack", lambda traces: step.pack(traces, 1, MICRO_BATCH_TOKENS)[0])


@pytest.mark.parametrize(
    ("settings", "change"),
    [({"backend": "torch"}, several_ranks), ({"zero_stage": 2}, none), ({"zero_stage": 3}, none)],
    ids=["several ranks", "stage 2", "stage 3"],
)
def test_no_step_is_computed_again_where_half_of_it_would_stay(
    settings: dict[str, Any],
    change: Callable[[Any, pytest.MonkeyPatch], None],
    start: StartEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = start(**settings, micro_batch_tokens=MICRO_BATCH_TOKENS)
    change(engine, monkeypatch)
    memory = Memory(engine, 2)
    with pytest.raises(OutOfMemory):
        engine.train_step(make_batch(), 1e-2)
    assert memory.passes == 2


def test_an_optimizer_step_that_fails_half_way_is_not_taken_again(
    start: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: Any = start(backend="torch")
    calls = []

    def fail(rates: list[float]) -> float:
        calls.append(rates)
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(engine._backend, "step", fail)
    with pytest.raises(OutOfMemory):
        engine.train_step(make_batch(), 1e-2)
    assert calls == [[1e-2]]


def test_a_gap_that_has_no_room_is_not_measured(
    start: StartEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    engine = start(backend="torch")
    engine.write_weights(tmp_path / "v1")
    monkeypatch.setattr(frozen, "frozen_scorer", no_room)
    gap = engine.logprob_gap_at(make_batch().traces[0], 1, tmp_path / "v1")
    assert gap != gap


@pytest.mark.parametrize(
    ("given", "set_to"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, None),
    ],
)
def test_segments_of_gpu_memory_grow_unless_the_user_says_otherwise(
    given: dict[str, str], set_to: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", given)
    spawn_ranks(1, shutdown_s=1.0)
    assert os.environ.get("PYTORCH_ALLOC_CONF") == set_to
