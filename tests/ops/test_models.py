"""Models are directories: checked when named, made once when they come from a package."""

import threading
from importlib import metadata
from pathlib import Path

import pytest

from horizonrl.actors.chat import ChatTemplate
from horizonrl.common.errors import ConfigError, MissingDependency
from horizonrl.ops import models
from horizonrl.ops.models import POCKET, SMOLLM2, known_model, model_identity, resolve_model


def test_a_model_directory_is_returned_as_it_is(tiny_models: tuple[Path, Path]) -> None:
    assert resolve_model(str(tiny_models[0])) == tiny_models[0]


@pytest.mark.parametrize("absent", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_directory_that_is_no_model_is_refused_by_what_it_lacks(tmp_path: Path, absent: str) -> None:
    for name in {"config.json", "tokenizer.json", "model.safetensors"} - {absent}:
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=absent.replace("model", ".*")):
        resolve_model(tmp_path)


def test_an_unknown_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not downloaded"):
        resolve_model("gpt-nine", tmp_path)


def test_a_known_model_is_found_where_it_was_made_and_never_made(tmp_path: Path) -> None:
    assert known_model(POCKET, tmp_path) is known_model(SMOLLM2, tmp_path) is known_model(tmp_path / "none") is None
    (tmp_path / SMOLLM2).mkdir()
    assert known_model(SMOLLM2, tmp_path) == tmp_path / SMOLLM2
    assert known_model(str(tmp_path), tmp_path / "cache") == tmp_path
    assert not (tmp_path / "cache").exists()


def test_the_identity_changes_with_tokenizer_and_template_only(tiny_models: tuple[Path, Path], tmp_path: Path) -> None:
    first, second = (model_identity(model) for model in tiny_models)
    assert first == second, "other weights are another version, not another meaning of ids"
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / name).write_bytes((tiny_models[0] / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    changed = model_identity(tmp_path)
    assert changed["model"] == first["model"]
    assert changed["template"] != first["template"]


def test_a_missing_package_is_named_with_its_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> list[Path]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "files", absent)
    with pytest.raises(MissingDependency, match="pip install"):
        resolve_model(SMOLLM2, tmp_path)


def test_a_model_is_made_once_when_several_ask_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
