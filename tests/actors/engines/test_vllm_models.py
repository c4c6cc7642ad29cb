"""Directories as the hub has them, in a real engine on CPU: their frames are accepted, and every tensor is probed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from horizonrl.common.model_dir import INDEX
from horizonrl.learner.engine.checkpoint.weights_file import write_weights_file
from horizonrl.learner.engine.model.lora import policy_weights
from horizonrl.learner.engine.model.model import load_language_model
from horizonrl.ops.models.tiny_model import make_tiny_qwen
from tests.actors.engines.apart import Apart

pytestmark = pytest.mark.process

PLAYED = """
import asyncio, json, sys
from pathlib import Path
from horizonrl.actors.engines.vllm import VllmPolicy
from horizonrl.actors.policy import InferenceSettings
from horizonrl.common.errors import HorizonError
from horizonrl.common.types import PolicyVersion

async def main(model, frames):
    policy = await VllmPolicy.start(InferenceSettings(Path(model), 256, 4, kv_cache_mib=16))
    sampled = []
    for version, frame in enumerate([None, *frames]):
        if frame is not None:
            await policy.apply(Path(frame), PolicyVersion(version=version))
        seen = await policy.generate([11, 12, 13], max_tokens=16, temperature=1.0, stop_ids=(), seed=5)
        sampled.append([seen.ids, seen.logprobs])
    await policy.close()
    print(json.dumps(sampled), flush=True)

asyncio.run(main(sys.argv[1], sys.argv[2:]))
"""


def play(apart: Apart, model: Path, *frames: Path) -> Any:
    """Return what an engine samples with a model's own weights and then with each frame."""
    done = apart.run(PLAYED, str(model), *map(str, frames))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def tied_with_head(path: Path, seed: int) -> Path:
    """A tied Qwen2 whose file holds its head too, as Qwen3-0.6B's and many fine-tuned models' do."""
    model = make_tiny_qwen(path, seed)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    tensors = load_file(model / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    return model


def as_frame(model: Path, path: Path) -> Path:
    """Write what a learner sends of a model."""
    weights = {
        name: parts[0].detach() for name, parts in policy_weights(load_language_model(model))
    }
    write_weights_file(weights, path)
    return path


def beside_a_second_copy(model: Path) -> Path:
    """Make one shard and an index of a model's file, beside Mistral's second copy under other names."""
    tensors = load_file(model / "model.safetensors")
    save_file(
        {f"layers.{name}": tensor for name, tensor in tensors.items()},
        model / "consolidated.safetensors",
    )
    (model / "params.json").write_text("{}")
    shard = model / "model-00001-of-00001.safetensors"
    (model / "model.safetensors").rename(shard)
    (model / INDEX).write_text(
        json.dumps({"metadata": {}, "weight_map": dict.fromkeys(tensors, shard.name)})
    )
    return model


def test_a_tied_model_whose_file_holds_its_head_takes_the_learners_frames(
    apart: Apart, tmp_path: Path
) -> None:
    first, second = (
        tied_with_head(tmp_path / name, seed) for seed, name in enumerate(("first", "second"))
    )
    frames = [as_frame(model, tmp_path / f"{model.name}.safetensors") for model in (second, first)]
    assert "lm_head.weight" not in load_file(frames[0])
    began, changed, back = play(apart, first, *frames)
    assert began == back
    assert began[1] != changed[1]


def test_the_indexs_files_are_the_model_beside_a_second_copy(apart: Apart, tmp_path: Path) -> None:
    model = beside_a_second_copy(make_tiny_qwen(tmp_path / "model", 0))
    began, again = play(apart, model, as_frame(model, tmp_path / "frame.safetensors"))
    assert began == again


def test_a_model_with_a_tensor_that_vllm_does_not_compute_with_is_refused_at_the_start(
    apart: Apart, tmp_path: Path
) -> None:
    model = make_tiny_qwen(tmp_path / "model", 0)
    tensors = load_file(model / "model.safetensors")
    for layer in range(2):  # vLLM passes over such tables, which it makes itself
        tensors[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = torch.ones(16)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    refused = apart.run(PLAYED, str(model))
    assert refused.returncode == 1
    assert "of which 2 tensors could not be compared" in refused.stderr
    assert "such as model.layers.0.self_attn.rotary_emb.inv_freq" in refused.stderr


def test_an_adapters_file_beside_the_model_is_refused_before_vllm_reads_it(
    apart: Apart, tmp_path: Path
) -> None:
    model = make_tiny_qwen(tmp_path / "model", 0)
    adapter = {"base_model.model.x.lora_A.weight": torch.zeros(2, 2)}
    save_file(adapter, model / "adapter_model.safetensors")
    refused = apart.run(PLAYED, str(model))
    assert refused.returncode == 1
    assert "holds weights twice: adapter_model.safetensors" in refused.stderr
    assert "EngineDead" not in refused.stderr


def test_a_hybrid_model_is_refused_on_a_cpu_where_its_convolutions_stay_old(
    apart: Apart, tmp_path: Path
) -> None:
    model = make_tiny_qwen(tmp_path / "model", 0)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(
        json.dumps(config | {"layer_types": ["conv", "full_attention"]})
    )
    refused = apart.run(PLAYED, str(model))
    assert refused.returncode == 1
    assert "a hybrid model" in refused.stderr
