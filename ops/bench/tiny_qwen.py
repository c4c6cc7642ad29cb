"""A tiny Qwen2.5 with random weights: it stands in for the weights of the recipes in `ops/recipes/agentgym-rl`.

    python -m horizonrl.ops.bench.tiny_qwen DIR

Not in `tiny_model.py`, whose bytes say which pocket model is meant: a change there makes it anew.
"""

import sys
from pathlib import Path
from typing import Any

from horizonrl.ops.models.models import save_model
from horizonrl.ops.models.tiny_model import VOCABULARY, make_tokenizer


def make_tiny_qwen(path: Path, seed: int = 0) -> Path:
    """Write a Hugging Face directory of about 430,000 random parameters in bfloat16; return it.

    The architecture is that of Qwen2.5-7B-Instruct: a head of its own, biases on queries, keys and values, and a
    context of 32,768 tokens. The same seed gives the same weights.
    """
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = make_tokenizer()
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32_768,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=False,
        initializer_range=0.1,
        bos_token_id=tokenizer.convert_tokens_to_ids("<|im_start|>"),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="bfloat16",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        qwen: Any = Qwen2ForCausalLM
        model = qwen(config).to(torch.bfloat16)
    save_model(model, tokenizer, path)
    return path


if __name__ == "__main__":
    make_tiny_qwen(Path(sys.argv[1]))
