"""What a version costs to send as changes, against the whole file, its entropy, and other forms."""

import time
from collections.abc import AsyncIterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from horizonrl.broker.weights.changes import read_layout, warm_up
from horizonrl.common.errors import RunFailed, WeightsRejected
from horizonrl.ops.bench.case import Case, Request, Side, constant, require
from horizonrl.ops.bench.forms import FORMS, Form, Words
from horizonrl.ops.bench.frames import make_frames
from horizonrl.ops.models.models import DEFAULT_CACHE, SMOLLM2

FRAMES = DEFAULT_CACHE.parent / "bench-weights"
"""Keeps the weights that a model was trained to."""


async def cases(request: Request) -> AsyncIterator[Case]:
    """Yield a case per learning rate."""
    require("torch", "zstandard")
    kept = FRAMES.expanduser() / (request.model or SMOLLM2).replace("/", "--")
    pairs = make_frames(request.model_dir(), request.scratch if request.small else kept)
    warm_up()
    for lr, *paths in pairs:
        yield compare(f"a version at a learning rate of {lr:g}", *map(read_image, paths))


def compare(what: str, old: Words, new: Words) -> Case:
    """Return the comparison of all forms of the change from one image to another."""
    sides: dict[str, Side] = {name: partial(send, form, old, new) for name, form in FORMS.items()}
    sides["entropy"] = constant("MB", entropy_bytes(old, new) / 1e6)
    sides["the whole file"] = constant("MB", new.nbytes / 1e6)
    return Case(f"{what}, {(old != new).mean():.2%} of the words changed", sides)


async def send(form: Form, old: Words, new: Words) -> Mapping[str, float]:
    """Encode a change and apply it, in CPU time. Raises RunFailed if another image comes out."""
    began = time.process_time()
    encoded = form.encode(old, new)
    encode_s, image = time.process_time() - began, old.copy()
    began = time.process_time()
    form.apply(image, encoded)
    apply_s = time.process_time() - began
    if not np.array_equal(image, new):
        raise RunFailed("the form is inexact: another image comes out")
    return {"MB": len(encoded) / 1e6, "s to encode": encode_s, "s to apply": apply_s}


def read_image(path: Path) -> Words:
    """Return a file as words. Raises WeightsRejected if it is no safetensors file."""
    data = np.fromfile(path, np.uint8)
    layout = read_layout(data)
    if layout.data_offset % 2 or len(data) % 2:
        raise WeightsRejected(
            f"{path}: the bench compares tensors of 16-bit words, and these begin or end between two"
        )
    return data.view(np.uint16)


def entropy_bytes(old: Words, new: Words) -> float:
    """Return the entropy of the changes given what both sides know: of each word's tensor and old exponent.

    Positions given tensor and exponent, and the values of changed words given the exponent: the sum over all cells of
    the binary entropy of "changed", and of the empirical entropy of the difference. (Values given the tensor too would
    count what thousands of tables of a few values each fit by chance.) A form that sends tables pays for them on top.
    """
    bits = 0.0
    values: dict[int, list[Words]] = {}
    for tensor in read_layout(old).tensors.values():
        mine = slice(tensor.offset // 2, (tensor.offset + tensor.size_bytes) // 2)
        exponent = ((old[mine] >> 7) & 0xFF).astype(np.uint8)
        at = np.flatnonzero(old[mine] != new[mine])
        total, marked = (
            np.bincount(exponent, minlength=256),
            np.bincount(exponent[at], minlength=256),
        )
        bits += _sum_entropy(marked, total) + _sum_entropy(total - marked, total)
        changes = new[mine][at] - old[mine][at]
        for occurring in np.flatnonzero(marked).tolist():
            values.setdefault(occurring, []).append(changes[exponent[at] == occurring])
    for pieces in values.values():
        _, counts = np.unique(np.concatenate(pieces), return_counts=True)
        bits += _sum_entropy(counts, counts.sum())
    return float(bits / 8)


def _sum_entropy(counts: Any, total: Any) -> float:
    """Return the sum of -count log2(count / total)."""
    share = np.divide(counts, total, out=np.ones(np.shape(counts)), where=(counts > 0))
    return float(-(counts * np.log2(share)).sum())
