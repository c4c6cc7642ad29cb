"""The learner's memory: layers keep less and make the same weights, and nothing grows faster than an episode does."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from horizonrl.learner.algorithm.batch import Batch
from horizonrl.learner.engine import recompute
from horizonrl.learner.engine.api import EngineSettings
from horizonrl.learner.engine.model import head
from horizonrl.learner.engine.registry import make_engine
from horizonrl.ops.bench import learner as bench
from tests.learner.engines import on_deepspeed
from tests.learner.traces import make_batch, make_groups

VOCABULARY, WIDEST = 512, 256
"""Of the tiny model: its ids, and the width of its widest layer."""
NEVER = 1 << 60


@pytest.fixture
def engines(tiny_model: Path) -> Iterator[Callable[..., Any]]:
    made = []

    def start(**settings: Any) -> Any:
        made.append(
            make_engine(
                EngineSettings(
                    tiny_model, **{"backend": "torch", "micro_batch_tokens": 4096} | settings
                )
            )
        )
        return made[-1]

    yield start
    for engine in made:
        engine.close()


@on_deepspeed
@pytest.mark.parametrize(
    "settings", [{}, {"backend": "deepspeed"}, {"lora_rank": 4}], ids=["torch", "deepspeed", "lora"]
)
def test_layers_that_keep_their_products_alone_make_the_same_weights(
    engines: Callable[..., Any],
    settings: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    digests = set()
    for worth in (0, NEVER):
        monkeypatch.setattr(recompute, "WORTH_RECOMPUTING_BYTES", worth)
        engine = engines(**settings)
        for batch in (make_batch(0), make_groups(1, groups=3, group_size=4, prompt=60)):
            engine.train_step(batch, 1e-3)
        digests.add(engine.write_weights(tmp_path / "weights"))
    assert len(digests) == 1


def test_a_product_that_its_layer_wrote_into_is_computed_again() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(3, 5, bias=False), nn.Linear(5, 3, bias=False)

        def forward(self, hidden: Tensor) -> Tensor:
            return hidden + self.down(self.up(hidden).mul_(2).exp())

    layer, hidden = Layer(), torch.arange(6.0).view(2, 3) / 10
    layer(hidden).sum().backward()
    expected = [parameter.grad for parameter in layer.parameters()]
    layer.zero_grad()
    first, second = recompute._first_and_second_pass()
    torch.utils.checkpoint.checkpoint(
        layer.forward, hidden, use_reentrant=False, context_fn=lambda: (first, second)
    ).sum().backward()
    for parameter, gradient in zip(layer.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)


class Largest(TorchDispatchMode):
    """Remembers how many elements the largest tensor had that any operator made."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.elements = max(
            [
                self.elements,
                *(leaf.numel() for leaf in tree_leaves(made) if isinstance(leaf, Tensor)),
            ]
        )
        return made


def test_no_tensor_of_a_long_episode_has_more_elements_than_its_tokens_are_wide(
    engines: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not tokens × tokens, which attention would have, and not trained tokens × vocabulary, which logits would."""
    monkeypatch.setitem(head.LOGITS_BYTES, "cpu", 256 * VOCABULARY * 2)
    engine, batch = engines(), episode(4096)
    assert len(batch.traces[0].ids_L) == 4096
    assert batch.trained_tokens > 4096 // 3
    with Largest() as largest:
        engine.train_step(batch, 1e-3)
    assert largest.elements <= 4096 * WIDEST < batch.trained_tokens * VOCABULARY


def episode(tokens: int) -> Batch:
    """Return a batch of one episode of random ids: turns of 96 tokens, which read 32 each."""
    turns = max(1, -(-(tokens - bench.PROMPT_TOKENS) // 128 * 5 // 4))
    (trace, *_) = bench.make_batch(1, turns=turns, generated=96, observed=32).traces
    cut = {
        name: getattr(trace, name)[:tokens]
        for name in ("ids_L", "turns_L", "logprobs_L", "versions_L", "rewards_L")
    }
    return Batch((type(trace)(**cut, group=0),), version=1)


def peak_bytes(engine: Any, tokens: int) -> int:
    """Return the most that a step of one episode holds at once, apart from what the engine holds anyway."""
    batch = episode(tokens)
    with profile(profile_memory=True) as profiled:
        engine.train_step(batch, 1e-3)
    events: Any = profiled.profiler
    held = most = 0
    for event in sorted(events.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def test_memory_grows_as_an_episode_does(
    engines: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(head.LOGITS_BYTES, "cpu", 256 * VOCABULARY * 2)
    monkeypatch.setattr(recompute, "WORTH_RECOMPUTING_BYTES", 0)
    engine = engines()
    shorter, longer = peak_bytes(engine, 1024), peak_bytes(engine, 2048)
    assert longer < 2.1 * shorter
    monkeypatch.setattr(recompute, "WORTH_RECOMPUTING_BYTES", NEVER)
    assert longer < 0.9 * peak_bytes(engine, 2048)
