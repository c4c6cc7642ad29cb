"""The cache of an engine on a shared GPU: sizes of real models on an 80-GB card, and what vLLM is told of them."""

import asyncio
import os
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from horizonrl.actors.engines import vllm as engine
from horizonrl.actors.engines.registry import start_policy
from horizonrl.actors.engines.vllm_memory import EngineSize, shared_cache_bytes
from horizonrl.actors.policy import InferenceSettings
from horizonrl.common.config.schema import RunConfig
from horizonrl.common.errors import ConfigError

GB = 10**9
SMALL = EngineSize(
    gpu_bytes=85 * GB,
    share=0.45,
    workers=1,
    weights_bytes=2 * 494_032_768,
    largest_bytes=2 * 151_936 * 896,
    step_tokens=16_384,
    requests=64,
    hidden=896,
    feed_forward=4864,
    vocabulary=151_936,
    context_bytes=8192 * 12_288,
)
"""Qwen2.5-0.5B on an H100, with contexts of 8,192 tokens."""
LARGE = replace(
    SMALL,
    weights_bytes=2 * 7_615_616_512,
    largest_bytes=2 * 152_064 * 3584,
    hidden=3584,
    feed_forward=18_944,
    vocabulary=152_064,
    context_bytes=8192 * 57_344,
)
"""Qwen2.5-7B on the same."""


@pytest.mark.parametrize(
    ("size", "workers", "cache_gb"),
    [(SMALL, 1, 34.2), (SMALL, 2, 35.1), (LARGE, 1, 17.4), (LARGE, 2, 26.5)],
)
def test_the_cache_is_what_weights_and_workspace_leave_of_the_share(
    size: EngineSize, workers: int, cache_gb: float
) -> None:
    divided = replace(size, workers=workers)
    assert shared_cache_bytes(divided) / GB == pytest.approx(cache_gb, abs=0.05)
    whole = shared_cache_bytes(divided) + divided.weights_bytes / workers + divided.workspace_bytes
    assert whole == pytest.approx(0.45 * 85 * GB)


def test_a_model_without_room_for_one_context_is_refused_with_the_numbers() -> None:
    with pytest.raises(
        ConfigError, match=r"is 0\.45: of a shared GPU of 24\.0 GB.*10\.8 GB.*15\.2 GB for weights"
    ):
        shared_cache_bytes(replace(LARGE, gpu_bytes=24 * GB))
    with pytest.raises(ConfigError, match=r"25\.0 GB for the cache of one context"):
        shared_cache_bytes(replace(LARGE, context_bytes=25 * GB))
    assert shared_cache_bytes(replace(LARGE, gpu_bytes=24 * GB, workers=4)) > LARGE.context_bytes


@pytest.mark.process
def test_the_size_is_read_from_vllms_own_config(tiny_models: tuple[Path, Path]) -> None:
    settings = InferenceSettings(
        tiny_models[0], max_context_tokens=256, slots=8, gpu_memory_share=0.4, shares_gpu=True
    )
    options = engine.engine_options(settings, on_cpu=False)
    environment = dict(os.environ)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # vLLM's own, about torch
            import vllm
            from vllm.usage.usage_lib import UsageContext

            config = vllm.AsyncEngineArgs(**options).create_engine_config(UsageContext.LLM_CLASS)
    finally:
        os.environ.clear()
        os.environ.update(environment)
    size = engine.engine_size(config, settings, 80 * GB)
    assert (size.hidden, size.feed_forward, size.vocabulary, size.requests) == (128, 256, 512, 8)
    assert size.largest_bytes == 2 * 512 * 128
    # bfloat16, keys and values, layers, heads, width.
    assert size.context_bytes == 256 * (2 * 2 * 2 * 2 * 32)
    assert size.step_tokens == 2048  # 8 contexts of 256 tokens: more never come at once
    assert size.weights_bytes < (tiny_models[0] / "model.safetensors").stat().st_size


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        ([], (0.9, False)),
        (["--actor.gpu_memory_share=0.45"], (0.45, True)),
        (["--actor.gpu_memory_share=0.6"], (0.6, False)),
    ],
)
def test_an_engine_with_at_most_half_a_gpu_shares_it(
    given: list[str], seen: tuple[float, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: list[InferenceSettings] = []

    async def start(asked: InferenceSettings) -> Any:
        settings.append(asked)

    monkeypatch.setattr("horizonrl.actors.engines.scripted.start", start)
    config = RunConfig.load([], ["--actor.engine=scripted", *given])
    asyncio.run(start_policy(config.actor, config.model, Path(), seed=0))
    assert (settings[0].gpu_memory_share, settings[0].shares_gpu) == seen


@pytest.mark.parametrize(("blocks", "warns"), [(32, False), (31, True)])
def test_a_cache_for_less_than_half_of_all_contexts_is_a_warning(blocks: int, warns: bool) -> None:
    cache = SimpleNamespace(num_gpu_blocks=blocks, block_size=16)
    settings = InferenceSettings(Path(), max_context_tokens=128, slots=8)
    with capture_logs() as logs:
        engine.tell_cache(SimpleNamespace(cache_config=cache), settings)
    assert logs[0]["cache_tokens"] == blocks * 16
    assert ("cache_small" in [line["event"] for line in logs]) == warns
