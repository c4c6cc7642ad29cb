"""Workers of vLLM that are patched from frame to frame, next to those that load each frame whole; run by their tests.

    python -m tests.actors.engines.patched RANK WORKERS MEETING MODEL...

A model's directory holds its frames. Prints what each worker did as JSON.
"""

import json
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from horizonrl.actors.engines import vllm_words
from horizonrl.actors.weights import path_of
from horizonrl.actors.words import changed_words, compare
from horizonrl.common.model_dir import tensor_shapes
from tests.actors.engines.plain_worker import plain_worker


def state(worker: Any) -> Mapping[str, Tensor]:
    return dict(worker.model_runner.get_model().named_parameters())


def different(one: Any, other: Any) -> list[str]:
    """Return the parameters that are not equal, bit for bit."""
    theirs = state(other)
    assert set(theirs) == set(state(one))
    return [name for name, mine in state(one).items() if not torch.equal(bits(mine), bits(theirs[name]))]


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def play(model: Path, meeting: Path, rank: int, workers: int) -> dict[str, Any]:
    frames = [model / "model.safetensors", *sorted(model.glob("*.frame"))]
    patched, whole = (plain_worker(model, meeting, rank, workers) for _ in range(2))
    seen: dict[str, Any] = {"takes": patched.takes_words(tensor_shapes(frames[0])), "steps": []}
    for version, (base, frame) in enumerate(pairwise(frames) if seen["takes"] else ()):
        positions = compare(base, frame)
        assert positions is not None
        words = changed_words(frame, positions)
        assert words is not None
        whole.load_frame(str(frame))
        before = different(patched, whole)
        with words:
            patched.load_words(str(frame), str(path_of(words)))
        probe = patched.probe_frame([str(frame)], version)
        step = {"before": before, "after": different(patched, whole), "probe": probe, "words": len(positions)}
        seen["steps"].append(step)
    return seen


if __name__ == "__main__":
    torch.set_num_threads(1)
    vllm_words.is_fast = lambda _model: True
    rank, workers, meeting, *models = sys.argv[1:]
    print(json.dumps([play(Path(model), Path(meeting), int(rank), int(workers)) for model in models]), flush=True)
