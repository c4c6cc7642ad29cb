"""Models are directories: checked when named, made once when they come from a package."""

import json
import shutil
import threading
from importlib import metadata
from pathlib import Path

import pytest

from horizonrl.actors.chat.template import ChatTemplate
from horizonrl.common.config.schema import RunConfig
from horizonrl.common.config.training import ModelSection
from horizonrl.common.errors import ConfigError, MissingDependency
from horizonrl.ops.models import models
from horizonrl.ops.models.models import (
    POCKET,
    SMOLLM2,
    hub_id,
    known_model,
    model_identity,
    resolve_model,
    trainable_model,
)
from horizonrl.ops.publish.card import base_model
from horizonrl.ops.rundir.directory import public_config


def test_a_model_directory_is_returned_as_it_is(tiny_models: tuple[Path, Path]) -> None:
    assert resolve_model(str(tiny_models[0])) == tiny_models[0]


@pytest.mark.parametrize("absent", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_directory_that_is_no_model_is_refused_by_what_it_lacks(
    tmp_path: Path, absent: str
) -> None:
    for name in {"config.json", "tokenizer.json", "model.safetensors"} - {absent}:
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=absent.replace("model", ".*")):
        resolve_model(tmp_path)


def test_a_model_without_a_chat_template_is_refused_before_anything_starts(
    tiny_models: tuple[Path, Path], tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_models[0], tmp_path / "base")
    (model / "chat_template.jinja").rename(model / "template.txt")
    with pytest.raises(ConfigError, match=r"no chat template.*use an instruction-tuned model"):
        resolve_model(model)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings["chat_template"] = (model / "template.txt").read_text()
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    assert resolve_model(model) == model
    (model / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json is not JSON"):
        resolve_model(model)


def test_a_mixture_of_experts_can_be_played_but_not_trained(
    tiny_models: tuple[Path, Path], tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_models[0], tmp_path / "experts")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"num_local_experts": 8}))
    assert resolve_model(model) == model
    with pytest.raises(ConfigError, match="8 experts per layer"):
        trainable_model(ModelSection(name=str(model)))
    assert trainable_model(ModelSection(name=str(tiny_models[0]))) == tiny_models[0]
    positions = json.loads((tiny_models[0] / "config.json").read_text())["max_position_embeddings"]
    with pytest.raises(ConfigError, match=f"has {positions} positions: lower it"):
        trainable_model(ModelSection(name=str(tiny_models[0]), max_context_tokens=positions + 1))


def test_an_unknown_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither a directory nor"):
        resolve_model("gpt-nine", tmp_path)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache that `hf download` fills, empty."""
    cache = tmp_path / "hub"
    cache.mkdir()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    return cache


def test_a_model_of_the_hub_is_found_where_hf_download_has_put_it(
    hub: Path, tiny_models: tuple[Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"`hf download Owner/Small-1\.5B`"):
        resolve_model("Owner/Small-1.5B")
    assert known_model("Owner/Small-1.5B") is None
    place = hub / "models--Owner--Small-1.5B"
    snapshot = shutil.copytree(tiny_models[0], place / "snapshots" / ("ab12" * 10))
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("ab12" * 10)
    assert resolve_model("Owner/Small-1.5B") == known_model("Owner/Small-1.5B") == snapshot
    assert hub_id(snapshot) == "Owner/Small-1.5B"
    assert base_model(snapshot)[0] == "Owner/Small-1.5B"
    run = RunConfig.load([], [f"--model.name={snapshot}"])
    assert public_config(run)["model"]["name"] == "Owner/Small-1.5B"
    assert hub_id(tiny_models[0]) is None


def test_a_model_of_the_hub_that_is_not_here_keeps_its_owner(tmp_path: Path) -> None:
    run = RunConfig.load([], ["--model.name=Qwen/Qwen2.5-7B-Instruct"])
    assert public_config(run)["model"]["name"] == "Qwen/Qwen2.5-7B-Instruct"
    assert base_model(Path(run.model.name))[0] == "Qwen/Qwen2.5-7B-Instruct"
    assert hub_id(tmp_path / "Qwen" / "Qwen2.5-7B-Instruct") is None


@pytest.mark.parametrize(
    "name", ["out/my--model", "out/my..model", "out/model-", "-out/model", "out/model.git"]
)
def test_a_path_that_is_not_there_and_no_id_of_the_hub_is_one_clear_message(name: str) -> None:
    with pytest.raises(ConfigError, match="neither a directory nor"):
        resolve_model(name)


def test_a_known_model_is_found_where_it_was_made_and_never_made(tmp_path: Path) -> None:
    assert (
        known_model(POCKET, tmp_path)
        is known_model(SMOLLM2, tmp_path)
        is known_model(tmp_path / "none")
        is None
    )
    (tmp_path / SMOLLM2).mkdir()
    assert known_model(SMOLLM2, tmp_path) == tmp_path / SMOLLM2
    assert known_model(str(tmp_path), tmp_path / "cache") == tmp_path
    assert not (tmp_path / "cache").exists()


def test_the_identity_changes_with_tokenizer_and_template_only(
    tiny_models: tuple[Path, Path], tmp_path: Path
) -> None:
    first, second = (model_identity(model) for model in tiny_models)
    assert first == second, "other weights are another version, not another meaning of ids"
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / name).write_bytes((tiny_models[0] / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    changed = model_identity(tmp_path)
    assert changed["model"] == first["model"]
    assert changed["template"] != first["template"]
    assert changed["stops"] == ""
    for ids, said in ((7, "7"), ([7, 8], "7 8")):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
        assert model_identity(tmp_path) == changed | {"stops": said}


def test_a_missing_package_is_named_with_its_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> list[Path]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "files", absent)
    with pytest.raises(MissingDependency, match="pip install"):
        resolve_model(SMOLLM2, tmp_path)


def test_a_model_is_made_once_when_several_ask_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []

    def convert(gguf: Path, out: Path) -> None:
        made.append(gguf)
        out.mkdir()

    monkeypatch.setattr(models, "_convert", convert)
    askers = [threading.Thread(target=resolve_model, args=(SMOLLM2, tmp_path)) for _ in range(4)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join(10)
    assert len(made) == 1
    assert made[0].suffix == ".gguf"
    assert (tmp_path / SMOLLM2).is_dir()


@pytest.mark.process
@pytest.mark.slow
def test_smollm2_is_made_with_its_chat_template_and_end_of_turn(tmp_path: Path) -> None:
    path = resolve_model(SMOLLM2, tmp_path)
    assert (path / "generation_config.json").is_file()
    chat = ChatTemplate.load(path)
    assert chat.decode(chat.encode_turn("hello")) == "hello"
    assert chat.stop_ids == (2,)
    opened = chat.open(None, "hi")
    assert "SmolLM" in chat.decode(opened)


def test_other_users_may_read_the_weights_that_we_write_where_they_may_read_the_config(
    tiny_models: tuple[Path, Path],
) -> None:
    files = [tiny_models[0] / name for name in ("config.json", "model.safetensors")]
    assert len({file.stat().st_mode for file in files}) == 1
