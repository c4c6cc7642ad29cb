"""An export is a directory that transformers opens."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from horizonrl.broker.weights.frames import digest_file
from horizonrl.common.errors import CheckpointError, ConfigError
from horizonrl.learner.engine.checkpoint.model_directory import VERSION_FILE, write_model_dir
from horizonrl.learner.engine.checkpoint.weights_file import WEIGHTS_FILE, write_weights_file


def card(facts: Mapping[str, Any]) -> str:
    return f"made by the caller: {sorted(facts)}"


@pytest.fixture
def weights(tiny_model: Path, tmp_path: Path) -> Path:
    """A checkpoint's directory with weights that are not the initial ones."""
    tensors = {
        name: tensor + 1 for name, tensor in load_file(tiny_model / "model.safetensors").items()
    }
    (tmp_path / "step-000003").mkdir()
    write_weights_file(tensors, tmp_path / "step-000003" / WEIGHTS_FILE)
    return tmp_path / "step-000003"


@pytest.mark.parametrize("from_checkpoint", [True, False])
def test_transformers_opens_an_export(
    tiny_model: Path, weights: Path, tmp_path: Path, from_checkpoint: bool
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = weights if from_checkpoint else weights / WEIGHTS_FILE
    out = write_model_dir(tiny_model, source, tmp_path / "out", {"version": 3}, card)
    lm = AutoModelForCausalLM.from_pretrained(out)
    assert lm.dtype == torch.bfloat16
    exported, expected = dict(lm.named_parameters()), load_file(weights / WEIGHTS_FILE)
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], expected[name]) for name in expected)
    tokenizers = [AutoTokenizer.from_pretrained(place) for place in (tiny_model, out)]
    chat = [{"role": "user", "content": "open the door"}]
    rendered = [tokenizer.apply_chat_template(chat, tokenize=False) for tokenizer in tokenizers]
    assert rendered[0] == rendered[1] and "open the door" in rendered[0]


def test_an_export_says_what_it_is(tiny_model: Path, weights: Path, tmp_path: Path) -> None:
    out = write_model_dir(
        tiny_model, weights, tmp_path / "out", {"run": "crafting", "version": 3}, card
    )
    facts = json.loads((out / VERSION_FILE).read_text())
    assert facts == {
        "run": "crafting",
        "version": 3,
        "digest": digest_file(out / "model.safetensors"),
    }
    written = (out / "README.md").read_text()
    assert written == "made by the caller: ['digest', 'run', 'version']"
    assert (out / "generation_config.json").is_file() and not list(out.glob(".*"))


def test_an_export_says_which_precision_its_weights_have(
    tiny_model: Path, weights: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    config = json.loads((tiny_model / "config.json").read_text())
    said = {
        "dtype": "float16",
        "torch_dtype": "float16",
        "text_config": {"torch_dtype": "float32", "kept": 1},
    }
    others = {"rope_scaling": {"factor": 2.0}, "quantization_config": {"quant_method": "fp8"}}
    (model / "config.json").write_text(json.dumps(config | said | others))
    (model / "adapter_config.json").write_text("{}")
    out = write_model_dir(model, weights, tmp_path / "out", {}, card)
    told = {
        "dtype": "bfloat16",
        "text_config": {"dtype": "bfloat16", "kept": 1},
        "rope_scaling": {"factor": 2.0},
    }
    assert json.loads((out / "config.json").read_text()) == config | told
    assert not (out / "adapter_config.json").exists()


def test_a_configuration_that_is_right_is_copied_as_it_is(
    tiny_model: Path, weights: Path, tmp_path: Path
) -> None:
    out = write_model_dir(tiny_model, weights, tmp_path / "out", {}, card)
    assert (out / "config.json").read_bytes() == (tiny_model / "config.json").read_bytes()


def test_an_export_is_never_written_over(tiny_model: Path, weights: Path, tmp_path: Path) -> None:
    write_model_dir(tiny_model, weights, tmp_path / "out", {}, card)
    with pytest.raises(ConfigError, match="choose another directory"):
        write_model_dir(tiny_model, weights, tmp_path / "out", {}, card)


def test_an_interrupted_export_can_be_repeated(
    tiny_model: Path, weights: Path, tmp_path: Path
) -> None:
    def interrupted(_: Mapping[str, Any]) -> str:
        raise KeyboardInterrupt

    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        write_model_dir(tiny_model, weights, out, {}, interrupted)
    assert write_model_dir(tiny_model, weights, out, {"version": 1}, card) == out
    assert not list(out.glob(".*"))


def test_a_folder_with_files_of_the_users_is_left_as_it_is(
    tiny_model: Path, weights: Path, tmp_path: Path
) -> None:
    own = tmp_path / "README.md"
    own.write_text("mine")
    with pytest.raises(ConfigError, match="is not empty"):
        write_model_dir(tiny_model, weights, tmp_path, {}, card)
    assert own.read_text() == "mine" and not (tmp_path / "config.json").exists()


def test_missing_weights_are_named(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no weights at .*weights\.safetensors"):
        write_model_dir(tiny_model, tmp_path, tmp_path / "out", {}, card)


def test_a_directory_that_is_no_model_is_named(weights: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        write_model_dir(tmp_path, weights, tmp_path / "out", {}, card)


def test_the_weights_file_is_bfloat16_and_appears_when_complete(tmp_path: Path) -> None:
    digest = write_weights_file({"a": torch.arange(4.0)}, tmp_path / "w.safetensors")
    assert load_file(tmp_path / "w.safetensors")["a"].dtype == torch.bfloat16
    assert digest == digest_file(tmp_path / "w.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["w.safetensors"]
    assert write_weights_file({"a": torch.arange(4.0)}, tmp_path / "again.safetensors") == digest
