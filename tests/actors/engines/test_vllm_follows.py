"""A real engine on CPU whose layers are left as on a GPU follows a learner: by changed words, and probed each time."""

import json
from pathlib import Path
from typing import Any

import pytest

from horizonrl.ops.models.tiny_model import make_tiny_model
from tests.actors.engines.apart import Apart

FOLLOWED = """
import asyncio, json, sys
from pathlib import Path
import numpy as np
from safetensors.numpy import save_file
from horizonrl.actors.engines import vllm_arguments
from horizonrl.actors.engines.vllm import VllmPolicy
from horizonrl.actors.policy import ChangedWords, InferenceSettings
from horizonrl.actors.weights.follower import WeightsFollower
from horizonrl.broker.memory import MemoryServer, MemoryTransport
from horizonrl.broker.weights.layout import read_layout
from horizonrl.common.errors import EngineDead, WeightsRejected
from horizonrl.common.types import PolicyVersion
from tests.weights import RandomLearner

async def main(model, folder):
    vllm_arguments.EXTENSION = "tests.actors.engines.plain_extension.PlainExtension"
    policy = await VllmPolicy.start(InferenceSettings(model, 256, 4, kv_cache_mib=16))
    call, calls, samples = policy._engine.collective_rpc, [], []

    async def noted(method, args=()):
        calls.append(method)
        return await call(method, args=args)

    async def sample():
        seen = await policy.generate([11, 12, 13], max_tokens=16, temperature=1.0, stop_ids=(), seed=5)
        samples.append([seen.ids, seen.logprobs, [span.version for span in seen.spans]])

    policy._engine.collective_rpc = noted
    transport = MemoryTransport(MemoryServer(), "run")
    learner = RandomLearner(transport, folder / "weights")
    data = np.fromfile(model / "model.safetensors", np.uint8)
    learner.words = {
        name: data[tensor.offset : tensor.offset + tensor.size_bytes].view(np.uint16).reshape(tensor.shape).copy()
        for name, tensor in read_layout(data).tensors.items()
    }
    (folder / "shadow").mkdir()
    follower = WeightsFollower(transport, policy, folder / "shadow")
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        task = group.create_task(follower.run(total_steps=9))
        for _ in range(3):
            manifest = await learner.step(share=0.01)
            assert await follower.reached(manifest.policy, 30)
            await sample()
        task.cancel()
    whole, words = folder / "whole", folder / "words"
    whole.write_bytes(learner.images[manifest.policy])
    save_file({}, words)
    # Words of another version than the one in use: all of the file is loaded.
    await policy.apply(whole, PolicyVersion(version=4), ChangedWords(PolicyVersion(version=2), words))
    await sample()
    # Words that leave the layers behind the file: the probe finds them.
    await learner.step(share=0.03)
    whole.write_bytes(next(iter(learner.images.values())))
    ends = []
    for attempt in (policy.apply(whole, PolicyVersion(version=5), ChangedWords(policy.version, words)), sample()):
        try:
            await attempt
        except (WeightsRejected, EngineDead) as error:
            ends.append(f"{type(error).__name__}: {error}")
    await policy.close()
    loads = [call for call in calls if call.startswith("load")]
    print(json.dumps({"loads": loads, "samples": samples, "ends": ends}), flush=True)

asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
"""


@pytest.mark.process
def test_an_engine_follows_by_words_and_samples_as_with_the_whole_file(
    apart: Apart, tmp_path: Path
) -> None:
    done = apart.run(FOLLOWED, str(make_tiny_model(tmp_path / "model")), str(tmp_path))
    assert done.returncode == 0, done.stderr
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert seen["loads"] == ["load_frame", "load_words", "load_words", "load_frame", "load_words"]
    (*_, third, fourth) = seen["samples"]
    assert third[:2] == fourth[:2], "by words and whole"
    assert [versions for *_, versions in seen["samples"]] == [[1], [2], [3], [4]]
    assert len({tuple(logprobs) for _, logprobs, _ in seen["samples"]}) == 3, (
        "each version is another"
    )
    rejected, dead = seen["ends"]
    assert rejected.startswith("WeightsRejected: the engine does not compute with v5.l0")
    assert dead.startswith("EngineDead: the weights of v5.l0")
