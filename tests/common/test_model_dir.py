"""A model's directory as it comes from elsewhere: whose files count, and what they say, until a run takes it."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from horizonrl.common.errors import ConfigError
from horizonrl.common.model_dir import (
    INDEX,
    SINGLE,
    is_tied,
    mixture,
    model_config,
    refuse_context,
    refuse_recurrent,
    refuse_untrainable,
    tensor_shapes,
    weight_files,
)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 8,
        (1 << 63).to_bytes(8, "little") + b"{}",
        (1 << 40).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (6).to_bytes(8, "little") + b'{"a":',
        (8).to_bytes(8, "little") + b'{"a":[]}',
        (8).to_bytes(8, "little") + b'{"a":{}}',
        (19).to_bytes(8, "little") + b'{"a":{"shape":null}',
    ],
)
def test_a_file_without_a_safetensors_header_is_a_clear_error(
    content: bytes, tmp_path: Path
) -> None:
    file = tmp_path / "frame"
    file.write_bytes(content)
    with pytest.raises(ValueError):  # noqa: PT011 - of several kinds: JSON's, UTF-8's, ours
        tensor_shapes(file)


def test_the_shapes_are_the_headers(tmp_path: Path) -> None:
    header = json.dumps(
        {"__metadata__": {}, "a": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}}
    ).encode()
    file = tmp_path / "frame"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(12))
    assert tensor_shapes(file) == {"a": (2, 3)}


def directory(place: Path, *files: str, indexed: tuple[str, ...] = ()) -> Path:
    for name in files:
        (place / name).touch()
    if indexed:
        weight_map = {f"tensor {number}": name for number, name in enumerate(indexed * 2)}
        (place / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return place


def test_the_weights_are_the_single_file_or_those_of_the_index(tmp_path: Path) -> None:
    shards = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    directory(tmp_path, *shards, "consolidated.safetensors", indexed=shards)
    assert [file.name for file in weight_files(tmp_path)] == list(shards)
    (tmp_path / INDEX).unlink()
    for name in (*shards, "consolidated.safetensors"):
        (tmp_path / name).unlink()
    assert weight_files(directory(tmp_path, SINGLE)) == [tmp_path / SINGLE]


def test_a_directory_with_two_sets_of_weights_is_refused_where_its_readers_disagree(
    tmp_path: Path,
) -> None:
    directory(tmp_path, SINGLE, "consolidated.safetensors")
    with pytest.raises(ConfigError, match=r"move consolidated\.safetensors elsewhere"):
        weight_files(tmp_path)
    directory(tmp_path, "shard.safetensors", indexed=("shard.safetensors",))
    with pytest.raises(ConfigError, match=r"move model\.safetensors elsewhere"):
        weight_files(tmp_path)


def test_missing_weights_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no model\.safetensors"):
        weight_files(directory(tmp_path, "pytorch_model.bin"))
    with pytest.raises(ConfigError, match=r"has no gone\.safetensors"):
        weight_files(
            directory(
                tmp_path, "here.safetensors", indexed=("here.safetensors", "gone.safetensors")
            )
        )
    (tmp_path / INDEX).write_text('{"weight_map": []}')
    with pytest.raises(ConfigError, match="does not say which files"):
        weight_files(tmp_path)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8},
            "128 experts per layer",
        ),
        ({"model_type": "mixtral", "num_local_experts": 8}, "8 experts per layer"),
        (
            {"model_type": "deepseek_v3", "n_routed_experts": 256, "n_shared_experts": 1},
            "256 experts per layer",
        ),
        ({"model_type": "ernie4_5_moe", "moe_num_experts": [64, 64]}, "64 experts per layer"),
        ({"model_type": "dbrx", "ffn_config": {"moe_num_experts": 16}}, "16 experts per layer"),
        (
            {"model_type": "llama4", "text_config": {"num_local_experts": 16}},
            "16 experts per layer",
        ),
        (
            {"block_configs": [{"block_type": "mlp"}, {"n_routed_experts": 4}]},
            "4 experts per layer",
        ),
        ({"model_type": "qwen3_moe"}, "model_type qwen3_moe"),
        ({"model_type": "qwen3"}, None),
        ({"model_type": "granitemoehybrid", "num_local_experts": 0}, None),
        ({"model_type": "hunyuan_v1_dense", "num_experts": 1}, None),
        ({"model_type": "doge", "num_experts": 16384, "is_moe": False}, None),
        (
            {
                "model_type": "gemma4",
                "text_config": {"num_experts": None, "enable_moe_block": False},
            },
            None,
        ),
    ],
)
def test_a_mixture_of_experts_is_known_by_its_configuration(
    config: dict[str, Any], said: str | None
) -> None:
    assert mixture(config) == said


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_experts": 4}, "4 experts per layer.*Choose a dense model"),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            r"quantised \(fp8\).*bfloat16 directory",
        ),
        ({"quantization_config": "int4"}, r"quantised \(unknown\)"),
        ([], "not a JSON object"),
        ("{", "cannot be read"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused_with_the_reason(
    config: Any, message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    with pytest.raises(ConfigError, match=message):
        refuse_untrainable(tmp_path)


LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        ({"max_position_embeddings": 2048}, 2048),
        ({"n_positions": 1024}, 1024),
        ({"text_config": {"max_position_embeddings": 512}}, 512),
        (
            {"max_position_embeddings": 1024, "rope_scaling": {"type": "linear", "factor": 4.0}},
            4096,
        ),
        ({"max_position_embeddings": 131072, "rope_parameters": LONGROPE}, 4096),
        ({"max_position_embeddings": 131072, "rope_scaling": {"type": "su"}} | LONGROPE, 4096),
        (
            {
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default"},
                    "full_attention": LONGROPE,
                }
            },
            4096,
        ),
    ],
)
def test_a_context_beyond_what_learner_and_actors_score_alike_is_refused(
    config: dict[str, Any], longest: int, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    refuse_context(tmp_path, longest)
    with pytest.raises(
        ConfigError, match=rf"model\.max_context_tokens is {longest + 1}.*{longest}.*[lL]ower"
    ):
        refuse_context(tmp_path, longest + 1)


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_frequencies_that_follow_the_longest_episode_are_refused(key: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({key: {"rope_type": "dynamic", "factor": 4.0}})
    )
    with pytest.raises(ConfigError, match="dynamic NTK"):
        refuse_context(tmp_path, 64)


def test_a_model_without_a_longest_context_takes_any(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    refuse_context(tmp_path, 1 << 20)


@pytest.mark.parametrize(
    ("config", "hybrid"),
    [
        ({"layer_types": ["conv", "full_attention"]}, True),
        ({"layer_types": ["linear_attention"]}, True),
        ({"mamba_d_ssm": 32}, True),
        ({"layer_types": ["sliding_attention", "full_attention"]}, False),
        ({}, False),
    ],
)
def test_a_hybrid_model_is_refused(config: dict[str, Any], hybrid: bool, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="a hybrid model") if hybrid else nullcontext():
        refuse_recurrent(tmp_path)


def test_an_adapter_beside_a_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    refuse_untrainable(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"holds adapter_config\.json.*Merge it"):
        refuse_untrainable(tmp_path)


def test_a_dense_model_is_trained(tiny_models: tuple[Path, Path]) -> None:
    refuse_untrainable(tiny_models[0])
    assert is_tied(model_config(tiny_models[0]))
    assert is_tied({"text_config": {"tie_word_embeddings": True}})
    assert not is_tied({})
