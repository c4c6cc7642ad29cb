"""A Hugging Face directory made of a run's weights: what `horizonrl export` writes and an evaluation plays.

The weights come merged: `model/lora.py` adds the adapters when the policy is copied out of the engine.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from horizonrl.broker.weights.frames import digest_file
from horizonrl.common.errors import CheckpointError
from horizonrl.common.files import atomic_write_text
from horizonrl.common.model_dir import model_config
from horizonrl.common.scratch import filling
from horizonrl.learner.engine.checkpoint.weights_file import WEIGHTS_FILE

VERSION_FILE = "version.json"
"""Written last: an export without it is incomplete."""

MODEL_FILES = ("*.json", "*.txt", "*.jinja", "*.model", "LICENSE*")
"""A model's other files: configurations, tokenizer, chat template."""
# An index names the model's shards, but the export is a single file, in which adapters are merged.
_NOT_COPIED = ("*.index.json", VERSION_FILE, "adapter_config.json")

_DTYPES = ("dtype", "torch_dtype")
"""The key of a configuration for the precision of its weights, and its name before transformers 5."""

Card = Callable[[Mapping[str, Any]], str]


def write_model_dir(
    model_dir: Path, weights: Path, out: Path, facts: Mapping[str, Any], card: Card
) -> Path:
    """Make `out` a directory that `AutoModelForCausalLM.from_pretrained` opens; return it.

    `model_dir` gives configuration, tokenizer and chat template; `weights` is a weights file, or a checkpoint that
    holds one. `facts` (run, version, step, ...) go into `version.json` with the digest; `card` turns them into the
    model card. Raises ConfigError if `out` has files that no earlier attempt wrote.
    """
    weights_file = weights / WEIGHTS_FILE if weights.is_dir() else weights
    if not weights_file.is_file():
        raise CheckpointError(
            f"no weights at {weights_file}: name a complete checkpoint or a safetensors file"
        )
    with filling(out):
        for source in _model_files(model_dir):
            shutil.copyfile(source, out / source.name)
        config = model_config(model_dir)
        if (converted := _in_bfloat16(config)) != config:
            (out / "config.json").write_text(
                json.dumps(converted, indent=2) + "\n", encoding="utf-8"
            )
        shutil.copyfile(weights_file, out / "model.safetensors")
        written = {**facts, "digest": digest_file(out / "model.safetensors")}
        (out / "README.md").write_text(card(written), encoding="utf-8")
        atomic_write_text(out / VERSION_FILE, json.dumps(written, indent=2, sort_keys=True) + "\n")
    return out


def _in_bfloat16(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration that says of its weights what `write_weights_file` has made of them."""
    kept = {
        key: value for key, value in config.items() if key not in (*_DTYPES, "quantization_config")
    }
    for name, part in config.items():
        if isinstance(part, dict) and any(key in part for key in _DTYPES):  # `text_config`
            kept[name] = _in_bfloat16(part)
    return kept | {"dtype": "bfloat16"}


def _model_files(model_dir: Path) -> list[Path]:
    if not (model_dir / "config.json").is_file():
        raise CheckpointError(
            f"no config.json in {model_dir}: name the Hugging Face directory that the run began with"
        )
    excluded = {path for pattern in _NOT_COPIED for path in model_dir.glob(pattern)}
    files = {path for pattern in MODEL_FILES for path in model_dir.glob(pattern) if path.is_file()}
    return sorted(files - excluded)
