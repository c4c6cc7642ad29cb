"""Workers of vLLM that are patched from frame to frame, next to those that load each frame whole; run by their tests.

    python -m tests.actors.engines.patched RANK WORKERS MEETING MODEL...

A model's directory holds its frames. Prints what each worker did as JSON.
"""

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors.torch import save_file
from torch import Tensor

from horizonrl.actors.weights.follower import path_of
from horizonrl.actors.weights.words import POSITIONS, changed_words, compare
from horizonrl.common.model_dir import tensor_shapes
from tests.actors.engines.plain_worker import plain_worker

NORM = "model.norm.weight"


def parameters(worker: Any) -> dict[str, Tensor]:
    return dict(worker.model_runner.get_model().named_parameters())


def different(one: Any, other: Any) -> list[str]:
    """Return the parameters that are not equal, bit for bit."""
    theirs = parameters(other)
    assert set(theirs) == set(parameters(one))
    return [
        name
        for name, mine in parameters(one).items()
        if not torch.equal(bits(mine), bits(theirs[name]))
    ]


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def words_between(base: Path, frame: Path) -> BinaryIO:
    positions = compare(base, frame)
    assert positions is not None and len(positions) > 100
    words = changed_words(frame, positions)
    assert words is not None
    return words


def play(model: Path, meeting: Path, rank: int, workers: int) -> dict[str, Any]:
    frames = [model / "model.safetensors", *sorted(model.glob("*.frame"))]
    patched, whole = (plain_worker(model, meeting, rank, workers) for _ in range(2))
    seen: dict[str, Any] = {"takes": patched.takes_words(tensor_shapes(frames[0])), "steps": []}
    seen["after trial"] = different(patched, whole)
    if not seen["takes"]:
        return seen
    for version, (base, frame) in enumerate(pairwise(frames)):
        whole.load_frame(str(frame))
        before = different(patched, whole)
        with words_between(base, frame) as words:
            patched.load_words(str(frame), str(path_of(words)))
        probe = patched.probe_frame([str(frame)], version)
        seen["steps"].append({"before": before, "after": different(patched, whole), "probe": probe})
    not_a_number = model / f"{rank}.nan"
    values = torch.tensor([torch.nan], dtype=torch.bfloat16)
    save_file({NORM: values, NORM + POSITIONS: torch.tensor([3])}, not_a_number)
    try:
        patched.load_words(str(frames[-1]), str(not_a_number))
    except ValueError as error:
        seen["NaN"] = str(error)
    seen["after NaN"] = different(patched, whole)
    # The words between the last two frames, on the first one.
    whole.load_frame(str(frames[0]))
    with words_between(*frames[-2:]) as words:
        whole.load_words(str(frames[-1]), str(path_of(words)))
    seen["on a wrong base"] = whole.probe_frame([str(frames[-1])], 0)["stale"]
    return seen


if __name__ == "__main__":
    torch.set_num_threads(1)
    rank, workers, meeting, *models = sys.argv[1:]
    print(
        json.dumps([play(Path(model), Path(meeting), int(rank), int(workers)) for model in models]),
        flush=True,
    )
