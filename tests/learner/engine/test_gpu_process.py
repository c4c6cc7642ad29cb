"""What a rank of the learner takes on a machine with GPUs, without such a machine."""

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from horizonrl.common.errors import ConfigError
from horizonrl.learner.engine.api import EngineSettings
from horizonrl.learner.engine.backends import deepspeed as backend
from horizonrl.learner.engine.step import prepare_process


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let torch find two GPUs, on a machine of eight cores; return what it is told: a GPU, and host threads."""
    told: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", told.append)
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    return told


@pytest.mark.parametrize(
    ("ranks", "rank", "threads", "host_threads"), [(1, 0, 1, 8), (2, 1, 1, 4), (2, 0, 6, 6)]
)
def test_each_rank_takes_its_gpu_and_its_share_of_the_cores(
    ranks: int,
    rank: int,
    threads: int,
    host_threads: int,
    taken: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if ranks > 1:
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    settings = EngineSettings(Path("/gone"), threads=threads)
    assert prepare_process(settings) == torch.device("cuda", rank)
    assert taken == [rank, host_threads]


def test_more_ranks_than_gpus_are_an_error_of_the_configuration(
    taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match=r"learner.ranks is 3, but this process sees 2 GPUs"):
        prepare_process(EngineSettings(Path("/gone")))
    assert taken == []


@pytest.mark.parametrize(
    ("available", "joined"), [(True, ("cuda", "nccl")), (False, ("cpu", "gloo"))]
)
def test_deepspeed_is_imported_for_the_device_and_its_ranks_join_over_the_devices_collectives(
    available: bool, joined: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    monkeypatch.setattr(backend, "_join_ranks", lambda name, timeout: told.append(name))
    logger = SimpleNamespace(setLevel=lambda level: None)
    # DeepSpeed chooses its accelerator once per process, as it is imported.
    for name, held in {
        "deepspeed": {
            "logger": logger,
            "init_distributed": lambda: told.append(os.environ["DS_ACCELERATOR"]),
        },
        "deepspeed.comm.torch": {},
    }.items():
        module = ModuleType(name)
        module.__dict__.update(held)
        monkeypatch.setitem(sys.modules, name, module)
    assert backend._start_deepspeed(EngineSettings(Path("/gone"))) is sys.modules["deepspeed"]
    assert told == list(reversed(joined))
