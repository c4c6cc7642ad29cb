"""Host time of one micro-batch on a GPU's path, measured on a CPU: `python -m tests.learner.engine.host_time`.

Matrices are so small that arithmetic is next to nothing, and the kernel for attention is replaced by one product. What
is left is Python and torch's dispatch, below which no GPU can go. `--layers` and `--segments` are those of a real model
and of a micro-batch.
"""

import argparse
import time
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from horizonrl.learner.engine import recompute
from horizonrl.learner.engine.model import attention
from horizonrl.learner.engine.model.model import TokenScorer

KEPT = {
    "everything": lambda lm: None,
    "inputs": recompute.checkpoint_layers,
    "products": recompute.keep_products,
}
TOKENS = 4
"""Of a segment, and of the prompt that the segments share."""


class Operators(TorchDispatchMode):
    """Counts what torch is asked for below autograd."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def kernel(q_THE: Tensor, k_KGE: Tensor, v_KGE: Tensor, *ranges: Any, **options: Any) -> Tensor:
    """Stand for the kernel: one operator forward and one backward, of all three tensors; its numbers mean nothing."""
    return q_THE * (k_KGE[:1, :1] + v_KGE[:1, :1])


def make_scorer(layers: int, kept: str) -> TokenScorer:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {
        "vocab_size": 512,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": layers,
    }
    lm: Any = Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=4, num_key_value_heads=2))
    lm = lm.to(torch.bfloat16).eval()
    KEPT[kept](lm)
    return TokenScorer(lm)


def make_micro_batch(segments: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ids, positions and segments of a prompt and its episodes, and the places of their trained tokens."""
    starts = range(TOKENS, TOKENS * (segments + 1), TOKENS)
    table = [(0, TOKENS, 0, 0), *((start, start + TOKENS, 0, TOKENS) for start in starts)]
    positions_T = torch.cat(
        [torch.arange(TOKENS), torch.arange(TOKENS, 2 * TOKENS).repeat(segments)]
    )
    asked_N = torch.tensor([start + 1 for start in starts])
    return torch.randint(512, (len(positions_T),)), positions_T, torch.tensor(table), asked_N


def measure(scorer: TokenScorer, asked: tuple[Tensor, ...]) -> tuple[int, float, float]:
    """Return the operators of a forward pass, and the least CPU seconds of a forward and of a backward pass."""
    seconds = []
    for _ in range(6):
        started = time.process_time()
        loss = scorer(*asked).logprobs_N.sum()
        between = time.process_time()
        loss.backward()
        seconds.append((between - started, time.process_time() - between))
    with torch.no_grad(), Operators() as operators:
        scorer(*asked)
    forward_s, backward_s = (min(column) for column in zip(*seconds, strict=True))
    return operators.count, forward_s, backward_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--segments", type=int, default=32)
    options = parser.parse_args()
    torch.set_num_threads(1)
    recompute.WORTH_RECOMPUTING_BYTES = 0
    asked = make_micro_batch(options.segments)
    print(
        "| attention | a layer keeps | operators, forward | forward, s | backward, s |\n|---|---|---|---|---|"
    )
    for path in ("by segment", "at once"):
        for kept in KEPT:
            scorer = make_scorer(options.layers, kept)
            attention._attend_on_cpu = attention._attend_by_segment
            attention.on_flash = lambda query, value, path=path: path == "at once"
            attention.varlen_attn = kernel
            operators, forward_s, backward_s = measure(scorer, asked)
            print(
                f"| {path} | {kept} | {operators:,} | {forward_s:.2f} | {backward_s:.2f} |",
                flush=True,
            )
            attention.on_flash = lambda query, value: False


if __name__ == "__main__":
    main()
