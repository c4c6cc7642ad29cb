"""Which GPUs a process was given, and that none of them is replaced by the CPU unseen."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from horizonrl.actors.engines.vllm import sees_gpu
from horizonrl.common.errors import ConfigError
from horizonrl.common.gpus import has_gpu, visible_gpus
from horizonrl.learner.engine.api import EngineSettings
from horizonrl.learner.engine.step import prepare_process
from tests.nvidia import SLICED, WHOLE, put_nvidia_smi


def test_the_environment_says_which_gpus_are_there() -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "3, GPU-ab"}) == ("3", "GPU-ab")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == ()


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        ("-1", ()),
        ("NoDevFiles", ()),
        ("0,-1,1", ("0",)),
        ("0,1", ("0", "1")),
        ("MIG-4,GPU-5", ("MIG-4", "GPU-5")),
    ],
)
def test_a_name_of_no_gpu_ends_the_list_as_it_does_for_cuda(
    given: str, seen: tuple[str, ...]
) -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": given}) == seen


@pytest.mark.parametrize(
    ("listed", "seen"), [("", ()), (WHOLE, ("0", "1")), (SLICED, ("MIG-a1", "MIG-a2", "GPU-bb"))]
)
def test_slices_count_instead_of_the_gpu_that_they_divide(
    listed: str, seen: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_nvidia_smi(tmp_path, monkeypatch, listed)
    assert visible_gpus({}) == seen


def a_torch(cuda: str | None, refusal: str | None) -> Any:
    """Return what stands for torch on a machine whose driver or build cannot use the GPU."""

    def init() -> None:
        if refusal:
            raise RuntimeError(refusal)

    return SimpleNamespace(
        __version__="2.13.0",
        version=SimpleNamespace(cuda=cuda),
        cuda=SimpleNamespace(is_available=lambda: False, init=init),
    )


OLD_DRIVER = "The NVIDIA driver on your system is too old (found version 12080)"


@pytest.mark.parametrize(
    ("fake", "reason"),
    [
        (torch, "built for CPUs, cannot use the GPUs 0, 1 (Torch not compiled with CUDA enabled)"),
        (
            a_torch("13.0", OLD_DRIVER),
            f"built with CUDA 13.0, cannot use the GPUs 0, 1 ({OLD_DRIVER})",
        ),
        (a_torch("13.0", None), "built with CUDA 13.0, cannot use the GPUs 0, 1 (it sees none)"),
    ],
    ids=["cpu build", "old driver", "hidden"],
)
def test_gpus_that_torch_cannot_use_are_an_error_with_the_reason_and_the_cure(
    fake: Any, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_nvidia_smi(tmp_path, monkeypatch, WHOLE)
    with pytest.raises(ConfigError) as refused:
        has_gpu(fake)
    assert reason in str(refused.value)
    assert "requirements/gpu.txt" in str(refused.value) and 'CUDA_VISIBLE_DEVICES=""' in str(
        refused.value
    )
    assert refused.value.exit_code == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not has_gpu(fake)


def test_without_gpus_there_is_nothing_to_refuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not has_gpu(torch)
    put_nvidia_smi(tmp_path, monkeypatch, "NVIDIA-SMI has failed: no driver", code=9)
    assert not has_gpu(torch)


def test_neither_learner_nor_engine_takes_the_cpu_where_it_was_given_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_nvidia_smi(tmp_path, monkeypatch, WHOLE)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # which the engine sets
    with pytest.raises(ConfigError, match="cannot use the GPUs 1 "):
        prepare_process(EngineSettings(tmp_path))
    with pytest.raises(ConfigError, match="cannot use the GPUs 1 "):
        sees_gpu()
