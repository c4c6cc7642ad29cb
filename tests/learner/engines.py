"""Engines for the learner's tests: on torch, or on DeepSpeed where a test names a stage.

What torch makes, DeepSpeed makes at stage 1 on one rank, bit for bit (`engine/test_backends.py`),
in many times as long.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from horizonrl.common.config.objective import Objective
from horizonrl.learner.engine.api import EngineSettings, RankEngine
from horizonrl.learner.engine.registry import make_engine
from tests.learner.sections import make_advantage

RETURNS = Objective(advantage=make_advantage(kind="return"))
"""Every token's advantage is its episode's return: a step can be computed by hand."""

StartEngine = Callable[..., RankEngine]


@pytest.fixture
def start(tiny_model: Path) -> Iterator[StartEngine]:
    """Start engines with the given settings; all are closed afterwards."""
    engines: list[RankEngine] = []

    def start_engine(**settings: Any) -> RankEngine:
        backend = "deepspeed" if "zero_stage" in settings else "torch"
        defaults = {"model_dir": tiny_model, "objective": RETURNS, "backend": backend}
        engines.append(make_engine(EngineSettings(**defaults | settings)))
        return engines[-1]

    yield start_engine
    for engine in engines:
        engine.close()


DEEPSPEED = [
    pytest.mark.process,
    pytest.mark.filterwarnings("ignore::FutureWarning:torch.distributed"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
]
"""Marks of a test that starts DeepSpeed in its own process."""


def on_deepspeed(test: Callable[..., None]) -> Callable[..., None]:
    """Put these marks on one test of a file that has others."""
    for mark in DEEPSPEED:
        test = mark(test)
    return test


def weights_of(engine: RankEngine, path: Path) -> torch.Tensor:
    engine.write_weights(path)
    return torch.cat([tensor.flatten().float() for _, tensor in sorted(load_file(path).items())])


def cosine(first: torch.Tensor, second: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(first, second, dim=0))
