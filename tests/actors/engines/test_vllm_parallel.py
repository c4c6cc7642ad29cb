"""One engine on two workers: each loads its shard of a version, and each proves that it computes with it."""

from pathlib import Path

import pytest

from horizonrl.actors.engines.vllm import VllmPolicy
from horizonrl.actors.policy import Generation, InferenceSettings
from horizonrl.common.types import PolicyVersion
from horizonrl.ops.models.tiny_model import make_tiny_qwen
from tests.actors.engines.apart import Apart

PROGRAM = """
import asyncio, sys
from pathlib import Path
from tests.actors.engines.test_vllm_parallel import applied_and_back

asyncio.run(applied_and_back(*map(Path, sys.argv[1:])))
"""


@pytest.mark.process
def test_every_worker_applies_a_version_and_samples_as_a_fresh_engine_would(
    apart: Apart, tmp_path: Path
) -> None:
    models = [make_tiny_qwen(tmp_path / str(seed), seed) for seed in range(2)]
    done = apart.run(PROGRAM, *map(str, models))
    assert done.returncode == 0, done.stderr


async def applied_and_back(first: Path, second: Path) -> None:
    old, new = first / "model.safetensors", second / "model.safetensors"
    settings = InferenceSettings(
        first, max_context_tokens=256, slots=8, kv_cache_mib=16, tensor_parallel=2
    )
    policy = await VllmPolicy.start(settings)
    try:
        fresh = await sampled(policy)
        await policy.apply(new, PolicyVersion(version=1))
        other = await sampled(policy)
        assert other.ids != fresh.ids
        assert {span.version for span in other.spans} == {1}
        # The engine's own workers: each has an answer, and each finds the file before stale in every kind of layer.
        for file, stale in ((new, False), (old, True)):
            probes = await policy._engine.collective_rpc("probe_frame", args=([str(file)], 1))
            assert len(probes) == 2
            assert all(
                bool(probe["stale"]) is stale and probe["compared"] >= 10 for probe in probes
            ), probes
        await policy.apply(old, PolicyVersion(version=2))
        again = await sampled(policy)
        assert (again.ids, again.logprobs) == (fresh.ids, fresh.logprobs)
    finally:
        await policy.close()


async def sampled(policy: VllmPolicy) -> Generation:
    return await policy.generate(
        list(range(5, 40)), max_tokens=12, temperature=1.0, stop_ids=(), seed=3
    )
