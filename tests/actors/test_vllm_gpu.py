"""What the actor does on a machine with a GPU before vLLM starts its engine, without such a machine."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from horizonrl.actors.engines import vllm as engine
from horizonrl.actors.engines.vllm_memory import RUNTIME_BYTES
from horizonrl.actors.policy import InferenceSettings
from horizonrl.common.config.schema import LARGEST_SHARED
from horizonrl.common.errors import ConfigError

CARD = 80 * 10**9
SETTINGS = InferenceSettings(Path("/gone"), max_context_tokens=128)
READ = (
    "VLLM_WORKER_MULTIPROC_METHOD",
    "VLLM_USE_FLASHINFER_SAMPLER",
    "VLLM_ENABLE_V1_MULTIPROCESSING",
)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch find two GPUs through NVML, and fail if anything asks CUDA itself."""

    def poison() -> int:
        raise AssertionError("CUDA was started in this process: a forked engine cannot use it")

    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)
    for name in READ:
        monkeypatch.delenv(name, raising=False)
    # All that the actor sets is undone, since it sets more than the names above.
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", poison, raising=False)
    monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: 2)
    monkeypatch.setattr(torch.cuda, "_cached_device_count", None)


@pytest.mark.usefixtures("gpu")
def test_a_gpu_is_found_without_starting_cuda() -> None:
    with pytest.raises(AssertionError, match="CUDA was started"):
        torch.cuda.is_available()  # what a fork would not survive
    torch.cuda._cached_device_count = None
    assert engine.sees_gpu()


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("given", "read"),
    [
        ({}, ("spawn", "0", None)),
        (
            {"VLLM_WORKER_MULTIPROC_METHOD": "fork", "VLLM_USE_FLASHINFER_SAMPLER": "1"},
            ("fork", "1", None),
        ),
    ],
)
def test_on_a_gpu_the_engine_is_spawned_and_samples_without_a_compiler(
    given: dict[str, str], read: tuple[str | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    os.environ.update(given)
    seen: list[tuple[str | None, ...]] = []

    class Arguments:
        def __init__(self, **options: Any) -> None:
            seen.append(tuple(os.environ.get(name) for name in READ))
            raise InterruptedError

    put_vllm(monkeypatch, Arguments, on_cpu=False)
    monkeypatch.setattr(engine, "fields", lambda of: ())
    with pytest.raises(InterruptedError):
        engine._start_engine(SETTINGS)
    assert seen == [read]


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("given", [True, False])
def test_torch_and_vllm_are_built_for_the_same(
    given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not given:
        monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: 0)
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    put_vllm(monkeypatch, None, on_cpu=given)
    message = (
        "a GPU here, .* for cpu: .*/gpu.txt" if given else "no GPU here, .* for cuda: .*/cpu.txt"
    )
    with pytest.raises(ConfigError, match=message):
        engine._start_engine(replace(SETTINGS, renewed=False))


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("share", "cache"), [(0.9, None), (0.45, 0.45 * CARD)])
def test_an_engine_names_its_gpu_and_is_told_the_size_of_its_cache_on_one_that_it_shares(
    share: float,
    cache: float | None,
    tiny_models: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts = {
        f"get_{name}": lambda *_: 2
        for name in ("hidden_size", "num_layers", "num_kv_heads", "head_size")
    }
    model = SimpleNamespace(**counts, get_vocab_size=lambda: 512, hf_text_config=SimpleNamespace())
    config = SimpleNamespace(
        model_config=model,
        parallel_config=None,
        scheduler_config=SimpleNamespace(max_num_batched_tokens=2048),
        cache_config=SimpleNamespace(kv_cache_memory_bytes=None),
    )

    class Arguments:
        def __init__(self, **options: Any) -> None:
            assert options["gpu_memory_utilization"] == share

        def create_engine_config(self, context: str) -> Any:
            assert context == "LLM_CLASS"
            return config

    put_vllm(monkeypatch, Arguments, on_cpu=False)
    monkeypatch.setattr(engine, "fields", lambda of: ())
    settings = InferenceSettings(
        tiny_models[0], 128, gpu_memory_share=share, shares_gpu=share <= LARGEST_SHARED
    )
    assert engine._start_engine(settings) == ("engine", "vllm 0.32.0 bfloat16 NVIDIA H100")
    told = config.cache_config.kv_cache_memory_bytes
    # Weights and workspace of the tiny model are small beside the runtime of CUDA.
    assert told == (None if cache is None else pytest.approx(cache - RUNTIME_BYTES, rel=0.001))


def put_vllm(monkeypatch: pytest.MonkeyPatch, arguments: Any, on_cpu: bool) -> None:
    """Put a vLLM in the place of the installed one that gets as far as its engine, and starts none."""
    platform = SimpleNamespace(
        is_cpu=lambda: on_cpu,
        device_type="cpu" if on_cpu else "cuda",
        get_device_total_memory=lambda: CARD,
        get_device_name=lambda: "NVIDIA H100",
    )
    for name, held in {
        "vllm": {"AsyncEngineArgs": arguments, "__version__": "0.32.0"},
        "vllm.platforms": {"current_platform": platform},
        "vllm.usage.usage_lib": {"UsageContext": SimpleNamespace(LLM_CLASS="LLM_CLASS")},
        "vllm.v1.engine.async_llm": {"AsyncLLM": lambda *_, **__: "engine"},
        "vllm.v1.executor": {"Executor": SimpleNamespace(get_class=lambda config: None)},
    }.items():
        module = ModuleType(name)
        module.__dict__.update(held)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize(
    ("before", "after", "kept"),
    [
        (None, "/venv/libgomp.so", "/venv/libgomp.so"),
        (None, "/a folder/libgomp.so", None),
        ("/mine.so", "/a folder/tcmalloc.so:/mine.so", "/mine.so"),
        (None, None, None),
    ],
)
def test_a_path_that_the_linker_would_split_is_not_preloaded(
    before: str | None, after: str | None, kept: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    if after is not None:
        monkeypatch.setenv("LD_PRELOAD", after)
    engine._take_back_split_paths(before)
    assert os.environ.get("LD_PRELOAD") == kept
