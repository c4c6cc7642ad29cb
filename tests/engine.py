"""One real vLLM engine for the whole session, on the tiny model."""

import asyncio
import os
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from horizonrl.actors.engines.vllm import VllmPolicy
from horizonrl.actors.policy import InferenceSettings, Policy
from horizonrl.ops.models.tiny_model import make_tiny_model
from tests.actors.engines.apart import Apart, forking
from tests.processes import command_line

T = TypeVar("T")


@pytest.fixture(scope="session")
def apart() -> Iterator[Apart]:
    with forking() as programs:
        yield programs


@dataclass(frozen=True)
class Played:
    """A policy with the loop that it lives on. Tests share it: each leaves the weights `first` behind."""

    runner: asyncio.Runner
    policy: Policy
    first: Path
    second: Path
    """Weights files of two models of the same shape; the policy began with the first."""

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(coroutine)


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    return make_tiny_model(folder / "first", seed=0), make_tiny_model(folder / "second", seed=1)


@pytest.fixture(scope="session")
def vllm_engine(tiny_models: tuple[Path, Path]) -> Iterator[Played]:
    """A VllmPolicy; what it does to this process is undone at the end, and no process of it is left."""
    import torch

    environment, threads = dict(os.environ), torch.get_num_threads()
    first, second = (model / "model.safetensors" for model in tiny_models)
    with asyncio.Runner() as runner:
        before = set(psutil.Process().children(recursive=True))
        settings = InferenceSettings(
            tiny_models[0], max_context_tokens=256, slots=8, kv_cache_mib=16
        )
        policy = runner.run(VllmPolicy.start(settings))
        started = set(psutil.Process().children(recursive=True)) - before
        yield Played(runner, policy, first, second)
        sockets = policy._engine.engine_core.resources.ctx
        runner.run(policy.close())
        sockets.term()  # vLLM leaves that to the collector, whose warning would fail whatever test runs then
        assert sockets.closed
        _, left = psutil.wait_procs(
            [child for child in started if "resource_tracker" not in " ".join(command_line(child))],
            10,
        )
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(threads)
    assert not left, f"{left} outlived the policy"
