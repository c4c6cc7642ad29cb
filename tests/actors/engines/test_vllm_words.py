"""Changed words through vLLM's own loader: every parameter gets the bits that a load of the whole file gives it."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from horizonrl.ops.models.tiny_model import make_tiny_model, make_tiny_qwen
from tests.contracts.test_models import FAMILIES, SMALL


def changed(tensor: Tensor, dice: torch.Generator) -> Tensor:
    """Change a fiftieth of a tensor's words, among them the first, the last, and the sign of a zero."""
    words = tensor.clone().view(-1)
    words[torch.rand(len(words), generator=dice) < 0.02] *= 1.5
    words[0], words[-1] = -words[0], 3e38
    words[len(words) // 2] = -0.0
    return words.view_as(tensor)


def add_frames(model: Path) -> Path:
    """Write two further versions of a model's weights beside its own."""
    dice = torch.Generator().manual_seed(1)
    tensors = load_file(model / "model.safetensors")
    for version in range(2):
        tensors = {name: changed(tensor, dice) for name, tensor in tensors.items()}
        save_file(tensors, model / f"{version}.frame", metadata={"format": "pt"})
    return model


def play(models: Sequence[Path], meeting: Path, workers: int) -> list[list[dict[str, Any]]]:
    """Return what each worker did with each model."""
    program = [sys.executable, "-m", "tests.actors.engines.patched"]
    processes = [
        subprocess.Popen(
            [*program, str(rank), str(workers), str(meeting), *map(str, models)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(workers)
    ]
    ends = [process.communicate(timeout=300) for process in processes]
    assert not any(process.returncode for process in processes), [error for _, error in ends]
    return [json.loads(output.splitlines()[-1]) for output, _ in ends]


@pytest.mark.process
@pytest.mark.parametrize("workers", [1, 2])
def test_patched_layers_have_the_bits_of_loaded_ones(workers: int, tmp_path: Path) -> None:
    # The Llama's head is tied. The Qwen has a head of its own, and biases in its fused layer of queries, keys, values.
    models = [
        add_frames(make_tiny_model(tmp_path / "llama")),
        add_frames(make_tiny_qwen(tmp_path / "qwen")),
    ]
    if workers == 1:
        models.append(falcon(tmp_path / "falcon"))
    for played in play(models, tmp_path / "meeting", workers):
        for seen in played[:2]:
            assert seen["takes"] and seen["after trial"] == []
            assert len(seen["steps"]) == 2
            for step in seen["steps"]:
                assert step["before"], "the frame changes what computes"
                assert step["after"] == []
                assert step["probe"]["stale"] == [] == step["probe"]["uncovered"]
                assert step["probe"]["compared"] > 4
            assert "NaN" in seen["NaN"] and seen["after NaN"] == [], (
                "it is vLLM's sign for a word that stays"
            )
            assert seen["on a wrong base"], "the probe finds what words leave behind"
        for seen in played[2:]:
            assert not seen["takes"], "its loader computes what it stores"
            assert seen["after trial"] == [], "its weights are loaded again"


def falcon(path: Path) -> Path:
    """Make a model that stores -exp of a file's decay."""
    (family,) = (family for family in FAMILIES if family.model_type == "falcon_h1")
    # vLLM has no heads of 16 on a CPU.
    options = SMALL | family.options | {"hidden_size": 64, "head_dim": 32}
    config = AutoConfig.for_model(family.model_type, **options)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(path)
    return path
