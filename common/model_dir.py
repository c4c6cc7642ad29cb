"""A model's Hugging Face directory, read without loading it: which files are its weights, and whether it can train.

Reads JSON and the headers of safetensors files only: the console and a launcher of ranks have no torch.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from horizonrl.common.errors import ConfigError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
HEAD = "lm_head.weight"
MAX_HEADER_BYTES = 100_000_000
"""Longest header of a safetensors file, as in its own reader."""
EXPERTS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "num_routed_experts",
    "moe_num_experts",
)
"""Keys of config.json for the number of experts per layer, over all families of transformers."""
NAMED_EXPERTS = ("moe", "mixtral", "dbrx")
"""Parts of the `model_type` of mixtures of experts, for a configuration that leaves the number to its default."""

POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len")
"""Keys of config.json for the longest context, over the families of transformers."""
ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
"""The `layer_types` of a model without other layers."""
SWITCHES = ("is_moe", "enable_moe_block")
"""Keys that turn experts off although their number is given."""


def weight_files(model_dir: Path) -> list[Path]:
    """Return the files that hold a model's weights: those that its index names, or else its one `model.safetensors`.

    Beside an index, other files are second copies, such as Mistral's `consolidated.safetensors`. Raises ConfigError
    where transformers and vLLM would not read the same files, and where there are none.
    """
    index, single = model_dir / INDEX, model_dir / SINGLE
    files = _read_index(index) if index.is_file() else [single]
    if missing := [file.name for file in files if not file.is_file()]:
        raise ConfigError(
            f"{str(model_dir)!r} has no {missing[0]}: not a model's directory, or not fetched whole"
        )
    # transformers prefers the single file to an index, vLLM the index; and without an index vLLM reads every file.
    beside = [single] if index.is_file() and single.is_file() else []
    if not index.is_file():
        beside = sorted(model_dir.glob("*.safetensors"))
    if others := [file.name for file in beside if file not in files]:
        raise ConfigError(
            f"{str(model_dir)!r} holds weights twice: {others[0]} beside {files[0].name}. Learner and actors would "
            f"not read the same files: move {others[0]} elsewhere"
        )
    return files


def tensor_shapes(*files: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in safetensors files, read from their headers. Raises ValueError."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in files:
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            # The length stands in the file itself. Unchecked, a damaged one would have us read any number of bytes
            # into memory.
            if header_bytes > min(MAX_HEADER_BYTES, path.stat().st_size - 8):
                raise ValueError(
                    f"{path} has no safetensors header: it would have {header_bytes} bytes"
                )
            header = json.loads(file.read(header_bytes))
        try:
            shapes |= {
                name: tuple(entry["shape"])
                for name, entry in header.items()
                if name != "__metadata__"
            }
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"{path} has no safetensors header: {error!r}") from error
    return shapes


def model_config(model_dir: Path) -> dict[str, Any]:
    """Return a model's `config.json`. Raises ConfigError for what is not a JSON object."""
    path = model_dir / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return config


def is_tied(config: Mapping[str, Any]) -> bool:
    """Return whether a configuration says that the head is the embedding."""
    text = config.get("text_config")
    inner = text.get("tie_word_embeddings", False) if isinstance(text, dict) else False
    return bool(config.get("tie_word_embeddings", inner))


def mixture(config: Mapping[str, Any]) -> str | None:
    """Return what makes a configuration that of a mixture of experts, ("128 experts per layer"); None if dense."""
    if any(config.get(switch) is False for switch in SWITCHES):
        return None
    counts = list(_expert_counts(config))
    if counts:
        # A layer with one expert is a plain one.
        return f"{max(counts)} experts per layer" if max(counts) > 1 else None
    kind = str(config.get("model_type", ""))
    return f"model_type {kind}" if any(part in kind for part in NAMED_EXPERTS) else None


def is_recurrent(config: Mapping[str, Any]) -> bool:
    """Return whether some layers of a configuration keep a state besides keys and values (Mamba, convolutions)."""
    kinds = set(config.get("layer_types") or ())
    return bool(kinds - ATTENTION) or any("mamba" in key for key in config)


def refuse_recurrent(model_dir: Path) -> None:
    """Raise ConfigError for a hybrid model, whose new weights do not all reach vLLM on a CPU."""
    if is_recurrent(model_config(model_dir)):
        raise ConfigError(
            f"model.name is {str(model_dir)!r}, a hybrid model: vLLM on a CPU computes its convolutions with copies "
            "that stay old. Choose a model of attention alone; `horizonrl eval` still plays this one, with "
            "actor.vllm.enable_chunked_prefill = true"
        )


def refuse_untrainable(model_dir: Path) -> None:
    """Raise ConfigError for a model whose new weights would not reach the actors as they are trained.

    `refuse_context` says the same of its positions.
    """
    config = model_config(model_dir)
    if (adapter := model_dir / "adapter_config.json").is_file():
        raise ConfigError(
            f"model.name is {str(model_dir)!r}, which holds {adapter.name}: transformers would load the adapter onto "
            "another model. Merge it into the weights (peft's merge_and_unload), or move it elsewhere if it is merged"
        )
    if (experts := mixture(config)) is not None:
        raise ConfigError(
            f"model.name is {str(model_dir)!r}, a mixture of experts ({experts}), of which new weights do not reach "
            "vLLM: the learner stacks the experts of a layer, vLLM loads each by itself, and on a CPU it computes with "
            "copies that stay old. Choose a dense model; `horizonrl eval` still plays this one"
        )
    if (quantised := config.get("quantization_config")) is not None:
        method = (
            quantised.get("quant_method", "unknown") if isinstance(quantised, dict) else "unknown"
        )
        raise ConfigError(
            f"model.name is {str(model_dir)!r}, whose weights are quantised ({method}), and a run trains bfloat16: "
            "choose the model's bfloat16 directory"
        )


def refuse_context(model_dir: Path, tokens: int) -> None:
    """Raise ConfigError for a model that is not the same one to learner and actors in a context of `tokens`."""
    config = model_config(model_dir)
    text = config | part if isinstance(part := config.get("text_config"), dict) else config
    name, factor = f"model.name is {str(model_dir)!r}", 1.0
    for rope in _ropes(text):
        kind, original = rope.get("rope_type", rope.get("type")), _original(rope, text)
        if kind == "dynamic":
            raise ConfigError(
                f"{name}, whose rotary frequencies follow the longest sequence so far (dynamic NTK): what a token "
                "scores would depend on the episodes beside it, and a resumed run would not repeat itself. Take the "
                "rope scaling out of config.json, with a context of the original length, or choose another model"
            )
        if kind in ("longrope", "su"):
            if original and tokens > original:
                raise ConfigError(
                    f"model.max_context_tokens is {tokens}, but {model_dir} has one set of rotary frequencies up to "
                    f"{original} tokens and another one above (longrope): vLLM would use the latter for every "
                    f"episode, the learner for the long ones alone. Lower model.max_context_tokens to {original}"
                )
        elif isinstance(rope.get("factor"), int | float):
            factor = max(factor, rope["factor"])
    longest = next((text[key] for key in POSITIONS if isinstance(text.get(key), int)), None)
    if longest and tokens > longest * factor:
        raise ConfigError(
            f"model.max_context_tokens is {tokens}, but {model_dir} has {int(longest * factor)} positions: lower it"
        )


def _ropes(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the scalings of rotary positions: one, or one per type of layer."""
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := config.get(key), dict):
            yield from (rope, *(part for part in rope.values() if isinstance(part, dict)))


def _original(rope: Mapping[str, Any], config: Mapping[str, Any]) -> int | None:
    key = "original_max_position_embeddings"
    return rope.get(key) or config.get(key)


def _read_index(index: Path) -> list[Path]:
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return [index.parent / name for name in sorted(names)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{index} does not say which files hold the weights ({error!r})"
        ) from None


def _expert_counts(config: Mapping[str, Any]) -> Iterator[int]:
    """Yield the numbers of experts in a configuration and in its parts (`text_config`, `ffn_config`, ...)."""
    for key, value in config.items():
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, dict):
                yield from _expert_counts(part)
            elif key in EXPERTS and isinstance(part, int):
                yield part
