"""`horizonrl bench weights`: what a version costs to send as changes, against the entropy and against other forms."""

import json
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from horizonrl.broker.weights.changes import read_layout, warm_up
from horizonrl.common.errors import MissingDependency, WeightsRejected
from horizonrl.ops.bench.weights.frames import made_frames
from horizonrl.ops.bench.weights.peers import PEERS, Words
from horizonrl.ops.models.models import DEFAULT_CACHE, SMOLLM2, resolve_model
from horizonrl.ops.terminal.console import plain_console

ROUNDS = 5
FRAMES = DEFAULT_CACHE.parent / "bench-weights"
MEASURED = ("bytes", "ratio", "encode_s", "apply_s", "exact")

Pair = tuple[float | None, Path, Path]


def run(
    json_file: Path | None = None,
    frames: Sequence[Path] | None = None,
    directory: Path | None = None,
    small: bool = False,
) -> int:
    """Measure the pair `frames`, or those made in `directory`; print tables. Return 1 if a form is inexact."""
    if find_spec("zstandard") is None:
        raise MissingDependency("bench weights compares with zstandard: pip install 'horizonrl[bench]'")
    with tempfile.TemporaryDirectory(prefix="horizonrl-bench-") as scratch:
        pairs = _pairs(frames, directory, Path(scratch) if small else None)
        warm_up()
        rows = [_measure(lr, *(_image(path) for path in paths)) for lr, *paths in pairs]
    _print(rows)
    if json_file is not None:
        json_file.write_text(json.dumps({"frames": rows}, indent=2) + "\n", encoding="utf-8")
    return 0 if all(form["exact"] for row in rows for form in row["forms"].values()) else 1


def _pairs(frames: Sequence[Path] | None, directory: Path | None, scratch: Path | None) -> Sequence[Pair]:
    if frames is not None:
        return [(None, frames[0], frames[1])]
    if scratch is not None:
        from horizonrl.ops.models.tiny_model import make_tiny_model

        return made_frames(make_tiny_model(scratch / "model"), directory or scratch)
    return made_frames(resolve_model(SMOLLM2), (directory or FRAMES).expanduser(), threads=2)


def _image(path: Path) -> Words:
    """Return a file as words. Raises WeightsRejected if it is no safetensors file."""
    data = np.fromfile(path, np.uint8)
    layout = read_layout(data)
    if layout.data_offset % 2 or len(data) % 2:
        raise WeightsRejected(f"{path}: the bench compares tensors of 16-bit words, and these begin or end between two")
    return data.view(np.uint16)


def _measure(lr: float | None, old: Words, new: Words) -> dict[str, Any]:
    """Measure all forms in turns, so that other load on the machine hits them alike."""
    bound = entropy_bytes(old, new)
    seconds: dict[tuple[str, str], list[float]] = {}
    sizes: dict[str, int] = {}
    exact = dict.fromkeys(PEERS, True)
    image = old.copy()
    for _ in range(ROUNDS):
        for name, peer in PEERS.items():
            began = time.process_time()
            encoded = peer.encode(old, new)
            seconds.setdefault((name, "encode_s"), []).append(time.process_time() - began)
            np.copyto(image, old)
            began = time.process_time()
            peer.apply(image, encoded)
            seconds.setdefault((name, "apply_s"), []).append(time.process_time() - began)
            sizes[name] = len(encoded)
            exact[name] &= bool(np.array_equal(image, new))
    forms = {
        name: {
            "bytes": sizes[name],
            "ratio": old.nbytes / sizes[name],
            **{kind: statistics.median(seconds[name, kind]) for kind in ("encode_s", "apply_s")},
            **{
                f"{kind}_range": [min(seconds[name, kind]), max(seconds[name, kind])]
                for kind in ("encode_s", "apply_s")
            },
            "exact": exact[name],
        }
        for name in PEERS
    }
    ours = forms["changes"]
    return {
        "lr": lr,
        "changed_share": float((old != new).sum() / len(old)),
        "frame_bytes": old.nbytes,
        **{key: ours[key] for key in MEASURED},
        "entropy_bytes": bound,
        "over_entropy": sizes["changes"] / bound,
        **{f"{name}_ratio": sizes[name] / sizes["changes"] for name in PEERS if name != "changes"},
        "peak_bytes": _peaks(old, new, image),
        "forms": forms,
    }


def _peaks(old: Words, new: Words, image: Words) -> dict[str, int]:
    """Return the most memory that encoding and applying hold, next to the images."""
    peer, peaks = PEERS["changes"], {}
    tracemalloc.start()
    encoded = peer.encode(old, new)
    peaks["encode"] = tracemalloc.get_traced_memory()[1]
    np.copyto(image, old)
    tracemalloc.reset_peak()
    peer.apply(image, encoded)
    peaks["apply"] = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peaks


def entropy_bytes(old: Words, new: Words) -> float:
    """Return the entropy of the changes given what both sides know: of each word's tensor and old exponent.

    Positions given tensor and exponent, and the values of changed words given the exponent: the sum over all cells of
    the binary entropy of "changed", and of the empirical entropy of the difference. (Values given the tensor too would
    count what thousands of tables of a few values each fit by chance.) A form that sends tables pays for them on top.
    """
    bits = 0.0
    values: dict[int, list[Words]] = {}
    for place in read_layout(old).tensors.values():
        mine = slice(place.offset // 2, (place.offset + place.size_bytes) // 2)
        exponent = ((old[mine] >> 7) & 0xFF).astype(np.uint8)
        at = np.flatnonzero(old[mine] != new[mine])
        total, marked = np.bincount(exponent, minlength=256), np.bincount(exponent[at], minlength=256)
        bits += _sum_entropy(marked, total) + _sum_entropy(total - marked, total)
        changes = new[mine][at] - old[mine][at]
        for each in np.flatnonzero(marked).tolist():
            values.setdefault(each, []).append(changes[exponent[at] == each])
    for pieces in values.values():
        _, counts = np.unique(np.concatenate(pieces), return_counts=True)
        bits += _sum_entropy(counts, counts.sum())
    return float(bits / 8)


def _sum_entropy(counts: Any, total: Any) -> float:
    """Return the sum of -count log2(count / total)."""
    share = np.divide(counts, total, out=np.ones(np.shape(counts)), where=(counts > 0))
    return float(-(counts * np.log2(share)).sum())


def _print(rows: list[dict[str, Any]]) -> None:
    console = plain_console()
    for row in rows:
        title = f"lr {row['lr']:g}: " if row["lr"] is not None else ""
        title += f"{row['changed_share']:.2%} of {row['frame_bytes'] / 1e6:.0f} MB changed"
        table = Table("form", "bytes", "1/", "times ours", "encode s", "apply s", "exact", title=title)
        for name, form in row["forms"].items():
            table.add_row(
                name,
                f"{form['bytes']:,}",
                f"{form['ratio']:.1f}",
                f"{form['bytes'] / row['bytes']:.2f}",
                f"{form['encode_s']:.3f}",
                f"{form['apply_s']:.3f}",
                "yes" if form["exact"] else "NO",
            )
        bound = row["entropy_bytes"]
        table.add_row("entropy", f"{bound:,.0f}", f"{row['frame_bytes'] / bound:.1f}", f"{bound / row['bytes']:.2f}")
        console.print(table)
        peaks = row["peak_bytes"]
        console.print(
            f"memory next to the images: encode {peaks['encode'] / 1e6:.0f} MB, apply {peaks['apply'] / 1e6:.0f} MB"
        )
    sys.stdout.flush()
