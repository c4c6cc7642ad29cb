"""The shape of a decoder-only transformer: its parameters, and what each token costs, from seven numbers."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from horizonrl.common.errors import ConfigError, did_you_mean
from horizonrl.common.model_dir import is_recurrent, refuse_untrainable


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A dense decoder with gated feed-forward layers, as Llama and Qwen2.5 have it."""

    name: str
    layers: int
    hidden: int
    feed_forward: int
    query_width: int
    """Heads times their width."""
    kv_width: int
    """Key-value heads times their width."""
    vocabulary: int
    tied: bool
    """Whether the head is the embedding."""
    qkv_bias: bool = False

    @property
    def layer_parameters(self) -> int:
        projections = (
            2 * self.hidden * (self.query_width + self.kv_width)
            + 3 * self.hidden * self.feed_forward
        )
        biases = (self.query_width + 2 * self.kv_width) * self.qkv_bias
        return projections + biases + 2 * self.hidden

    @property
    def parameters(self) -> int:
        tables = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.layers * self.layer_parameters + tables + self.hidden

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the key-value cache per token, in bfloat16."""
        return 2 * 2 * self.layers * self.kv_width

    def forward_flops(self, context_tokens: float, headed_share: float = 1.0) -> float:
        """Return the floating-point operations of one token's forward pass.

        `context_tokens` is the mean number of tokens that it attends to, and `headed_share` the share of tokens whose
        logits are computed. A product of a vector with an n × m matrix counts as 2nm (arXiv 2001.08361, section 2.1).
        """
        attention = 4 * self.layers * self.query_width * context_tokens
        head = 2 * self.vocabulary * self.hidden * headed_share
        return 2 * self.layers * self.layer_parameters + attention + head


def _qwen(
    size: str, numbers: tuple[int, int, int, int, int], vocabulary: int = 152_064
) -> ModelShape:
    layers, hidden, feed_forward, query_width, kv_width = numbers
    tied = vocabulary == 151_936
    return ModelShape(
        f"Qwen2.5-{size}",
        layers,
        hidden,
        feed_forward,
        query_width,
        kv_width,
        vocabulary,
        tied,
        qkv_bias=True,
    )


SIZES = {
    "135M": ModelShape("SmolLM2-135M", 30, 576, 1536, 576, 192, 49_152, tied=True),
    "0.5B": _qwen("0.5B", (24, 896, 4864, 896, 128), 151_936),
    "1.5B": _qwen("1.5B", (28, 1536, 8960, 1536, 256), 151_936),
    "3B": _qwen("3B", (36, 2048, 11_008, 2048, 256), 151_936),
    "7B": _qwen("7B", (28, 3584, 18_944, 3584, 512)),
    "8B": ModelShape("Llama-3.1-8B", 32, 4096, 14_336, 4096, 1024, 128_256, tied=False),
    "14B": _qwen("14B", (48, 5120, 13_824, 5120, 1024)),
    "32B": _qwen("32B", (64, 5120, 27_648, 5120, 1024)),
    "70B": ModelShape("Llama-3.1-70B", 80, 8192, 28_672, 8192, 1024, 128_256, tied=False),
    "72B": _qwen("72B", (80, 8192, 29_568, 8192, 1024)),
}
"""By the size in their names; the numbers are those of the models' config.json."""
_SIZE_IN_NAME = re.compile(r"(?<![\d.])(\d+(?:\.\d+)?[bm])(?![a-z])", re.IGNORECASE)


def shape_of_size(size: str) -> ModelShape:
    """Return the model of a size such as 7B. Raises ConfigError for one that is not in the table."""
    shapes = {name.upper(): shape for name, shape in SIZES.items()}
    if size.upper() not in shapes:
        raise ConfigError(
            f"--model-size is {size!r}, which is not in the table{did_you_mean(size.upper(), shapes)} It has "
            f"{', '.join(SIZES)}; for any other model give its directory as model.name, whose config.json is read"
        )
    return shapes[size.upper()]


def shape_of_name(name: str) -> ModelShape:
    """Return the model whose size stands in a name such as Qwen/Qwen2.5-7B-Instruct. Raises ConfigError."""
    sizes = [
        match
        for match in _SIZE_IN_NAME.findall(name)
        if match.upper() in {size.upper() for size in SIZES}
    ]
    if not sizes:
        raise ConfigError(
            f"model.name is {name!r}, which is not on this machine and names no size of the table: give --model-size, "
            f"one of {', '.join(SIZES)}"
        )
    return shape_of_size(sizes[-1])


def shape_of_directory(model_dir: Path) -> ModelShape:
    """Read a Hugging Face directory's config.json. Raises ConfigError for a model that is no dense decoder."""
    try:
        config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        width = int(config.get("head_dim") or hidden // heads)
        shape = ModelShape(
            name=model_dir.name,
            layers=int(config["num_hidden_layers"]),
            hidden=hidden,
            feed_forward=int(config["intermediate_size"]),
            query_width=heads * width,
            kv_width=int(config.get("num_key_value_heads") or heads) * width,
            vocabulary=int(config["vocab_size"]),
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=config.get("model_type") == "qwen2"
            or bool(config.get("attention_bias", False)),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{model_dir}/config.json does not say the model's shape ({error!r})"
        ) from None
    refuse_untrainable(model_dir)
    if is_recurrent(config):
        raise ConfigError(
            f"{model_dir} is a hybrid model, which the formulas do not cover: give --model-size"
        )
    return shape
