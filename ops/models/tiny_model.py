"""Tiny models with random weights, a byte-level tokenizer and a ChatML template: real ones that load in seconds.

    python -m horizonrl.ops.models.tiny_model DIR [qwen]

The fault benches and the tests train the Llama; the Qwen stands in for the weights of `ops/recipes/agentgym-rl`. The
pocket model's tokenizer is made here too.
"""

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from horizonrl.ops.models.models import save_model

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCABULARY = 512
TEXT = (
    "You are in a room. There is a chest of oak planks, a crafting table and a stick.\n",
    "get 2 oak log\ncraft 4 oak planks using 1 oak log\ninventory: [oak planks] (4)\n",
    "The agent opens the door, looks around and answers: it could not find what it was looking for.\n",
)


def make_tokenizer(
    special: tuple[str, ...] = SPECIAL, texts: Iterable[str] = TEXT, vocabulary: int = VOCABULARY
) -> Any:
    """Train a byte-level BPE of at most `vocabulary` ids on `texts`; the last special token ends a text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in special],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast: Any = PreTrainedTokenizerFast
    wrapped = fast(tokenizer_object=tokenizer, eos_token=special[-1], pad_token=special[-1])
    wrapped.chat_template = CHATML
    return wrapped


def make_tiny_model(path: Path, seed: int = 0) -> Path:
    """Write a Llama of about 360,000 random parameters with tied embeddings; return its directory.

    The same seed gives the same weights. vLLM on CPU wants heads of 32 or 64 dimensions.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"head_dim": 32, "max_position_embeddings": 1024, "tie_word_embeddings": True}
    return _write(path, seed, LlamaConfig, LlamaForCausalLM, shape)


def make_tiny_qwen(path: Path, seed: int = 0) -> Path:
    """Write a Qwen2.5 of about 430,000 random parameters; return its directory.

    The architecture is that of Qwen2.5-7B-Instruct: a head of its own, biases on queries, keys and values, and a
    context of 32,768 tokens.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM

    shape = {
        "max_position_embeddings": 32_768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "tie_word_embeddings": False,
    }
    return _write(path, seed, Qwen2Config, Qwen2ForCausalLM, shape)


def _write(
    path: Path, seed: int, config_class: Any, model_class: Any, shape: Mapping[str, Any]
) -> Path:
    import torch

    tokenizer = make_tokenizer()
    config = config_class(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.1,
        bos_token_id=tokenizer.convert_tokens_to_ids("<|im_start|>"),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="bfloat16",
        **shape,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config).to(torch.bfloat16)
    save_model(model, tokenizer, path)
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make a tiny model with random weights.")
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("family", nargs="?", choices=("llama", "qwen"), default="llama")
    asked = parser.parse_args()
    (make_tiny_qwen if asked.family == "qwen" else make_tiny_model)(asked.directory)
