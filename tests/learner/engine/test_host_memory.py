"""The copies of a GPU's weights in host memory, on a machine without one: its branch copies from the CPU."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from horizonrl.learner.engine import host_memory
from horizonrl.learner.engine.host_memory import CHUNK_BYTES, HostMemory
from tests.learner.engines import StartEngine
from tests.learner.traces import make_batch


class Gpu:
    """Stands for a GPU: what is pinned there, and how often its copies were waited for."""

    def __init__(self) -> None:
        self.pinned: list[int] = []
        self.waits = 0

    def pin(self, size_bytes: int) -> Tensor:
        self.pinned.append(size_bytes)
        return torch.empty(size_bytes, dtype=torch.uint8)

    def synchronize(self, _: torch.device) -> None:
        self.waits += 1


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    stand_in = Gpu()
    monkeypatch.setattr(host_memory, "_is_there", lambda _: False)
    monkeypatch.setattr(host_memory, "_pin", stand_in.pin)
    monkeypatch.setattr(torch.accelerator, "synchronize", stand_in.synchronize)
    return stand_in


def test_every_version_is_copied_into_the_same_pages(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "CHUNK_BYTES", 1 << 12)
    host, model = (
        HostMemory(),
        {name: torch.empty(size, 5) for name, size in (("a", 3), ("b", 300), ("c", 1))},
    )
    places: set[tuple[int, ...]] = set()
    for seed in range(3):
        torch.manual_seed(seed)
        for tensor in model.values():
            tensor.normal_()
        copies = {name: host.copy(name, tensor) for name, tensor in model.items()}
        assert gpu.waits == seed
        host.wait()
        assert all(
            torch.equal(copies[name], tensor.to(torch.bfloat16)) for name, tensor in model.items()
        )
        places.add(tuple(copy.data_ptr() for copy in copies.values()))
    assert len(places) == 1
    # 30 bytes, then 3,000 that still fit behind them, and 10 more.
    assert gpu.pinned == [1 << 12]
    host.wait()
    assert gpu.waits == 3  # nothing was asked for since


def test_a_tensor_that_is_larger_than_a_chunk_leaves_the_rest_of_its_own_to_others(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "CHUNK_BYTES", 1 << 10)
    host = HostMemory()
    shapes = {"embedding": (3, 401), "norm": (7,), "up": (600,), "down": (2, 300)}
    copies = {name: host.copy(name, torch.full(shape, 0.5)) for name, shape in shapes.items()}
    assert gpu.pinned == [1 << 12, 1 << 11]  # pinned memory comes in powers of two in any case
    starts = sorted((copy.data_ptr(), copy.nbytes) for copy in copies.values())
    assert all(start + size <= after for (start, size), (after, _) in pairwise(starts))
    assert all(
        torch.equal(copies[name], torch.full(shape, 0.5).bfloat16())
        for name, shape in shapes.items()
    )


def test_an_engine_writes_the_same_file_from_its_copies(
    gpu: Gpu, start: StartEngine, tmp_path: Path
) -> None:
    engine, on_a_cpu = start(backend="torch"), start(backend="torch")
    for seed in range(2):
        digests = set()
        for place, trainer in enumerate((engine, on_a_cpu)):
            trainer.train_step(make_batch(seed), 1e-2)
            with pytest.MonkeyPatch.context() as patched:
                if trainer is on_a_cpu:
                    patched.setattr(host_memory, "_is_there", lambda _: True)
                digests.add(trainer.write_weights(tmp_path / f"{seed}-{place}"))
        assert len(digests) == 1
    assert (len(gpu.pinned), gpu.waits) == (1, 2)


def test_a_model_on_a_cpu_is_not_copied() -> None:
    host, tensor = HostMemory(), torch.ones(3)
    assert host.copy("a", tensor) is tensor
    host.wait()
    assert CHUNK_BYTES & (CHUNK_BYTES - 1) == 0
