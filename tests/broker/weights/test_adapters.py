"""Adapters are added in one order, to the bit, and only if they fit."""

from typing import Any

import numpy as np
import pytest

from horizonrl.broker.weights.adapters import add_adapter, merge_adapters
from horizonrl.common.errors import WeightsRejected
from tests.weights import image, merged_words, rounded


def normal(dice: np.random.Generator, *shape: int) -> Any:
    return rounded(dice.normal(size=shape).astype(np.float32))


@pytest.mark.parametrize("rank", [1, 2, 3, 16, 33])
def test_the_sum_is_that_of_the_protocol_for_any_bit_pattern(rank: int) -> None:
    """Infinities, NaN, negative zero and subnormal numbers are among the words that are drawn as integers."""
    dice = np.random.default_rng(rank)
    for draw in (normal, lambda _, *shape: dice.integers(0, 1 << 16, shape, np.uint16)):
        for outputs, inputs in ((1, 1), (1, 200), (77, 1), (64, 33), (200, 129)):
            W, A, B = (
                draw(dice, *shape) for shape in ((outputs, inputs), (rank, inputs), (outputs, rank))
            )
            found = np.empty_like(W)
            add_adapter(W, A, B, found)
            assert np.array_equal(found, merged_words(W, A, B))


def test_adapters_of_zero_leave_the_weight_and_make_negative_zero_positive() -> None:
    W = np.array([[0x8000, 0x0000, 0x3F80, 0x0001]], np.uint16)
    found = np.empty_like(W)
    add_adapter(W, np.ones((2, 4), np.uint16), np.zeros((1, 2), np.uint16), found)
    assert found.tolist() == [[0, 0, 0x3F80, 1]]


def test_everything_but_the_matrices_with_adapters_is_that_of_the_frozen_model() -> None:
    """As with tied heads (one tensor), layers that are fused (more rows), and tensors of other types between them."""
    dice = np.random.default_rng(0)
    shapes = {
        "embed": (40, 8),
        "q": (8, 8),
        "norm": (9,),
        "qkv": (24, 8),
        "down": (8, 16),
        "empty": (0,),
    }
    words = {name: normal(dice, *shape) for name, shape in shapes.items()}
    adapters = {}
    for name in ("qkv", "down", "q"):
        outputs, inputs = shapes[name]
        adapters |= {
            f"{name}.lora_A": normal(dice, 3, inputs),
            f"{name}.lora_B": normal(dice, outputs, 3),
        }
    expected = words | {
        name: merged_words(words[name], adapters[f"{name}.lora_A"], adapters[f"{name}.lora_B"])
        for name in ("q", "qkv", "down")
    }
    base = image(words)
    found = bytearray(len(base))
    merge_adapters(base, image(adapters), found)
    assert bytes(found) == image(expected)


def test_adapters_that_do_not_fit_are_refused_before_anything_is_written() -> None:
    dice = np.random.default_rng(0)
    base = image({"a": normal(dice, 6, 4), "b": normal(dice, 5)})
    A, B = normal(dice, 2, 4), normal(dice, 6, 2)
    wrong: dict[str, dict[str, Any]] = {
        "in pairs": {"a.lora_A": A},
        "not in pairs": {"a.lora_A": A, "a.lora_B": B, "a": A},
        "no weight in the frozen model, or only one side": {"c.lora_A": A, "c.lora_B": B},
        "not made of matrices": {"b.lora_A": A, "b.lora_B": B},
        "and its weight": {"a.lora_A": normal(dice, 2, 5), "a.lora_B": B},
        "or has no rank": {"a.lora_A": A, "a.lora_B": normal(dice, 6, 3)},
    }
    for why, adapters in wrong.items():
        found = bytearray(len(base))
        with pytest.raises(WeightsRejected, match=why):
            merge_adapters(base, image(adapters), found)
        assert not any(found)
    with pytest.raises(WeightsRejected, match="the image has"):
        merge_adapters(base, image({"a.lora_A": A, "a.lora_B": B}), bytearray(len(base) - 1))
    with pytest.raises(WeightsRejected, match="no safetensors file"):
        merge_adapters(base, b"x", bytearray(len(base)))
