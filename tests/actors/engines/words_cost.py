"""What a version costs an engine: the whole file against changed words, side by side, on one model with plain layers.

    python -m tests.actors.engines.words_cost [--model DIR] [--share 0.003] [--rounds 5]

CPU seconds of this process with one thread. On a CPU a patch takes longer than a load, which is why engines on a CPU
load the file; what comes before the pause, the bytes and the probe are what this measures.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from horizonrl.actors.weights.follower import path_of
from horizonrl.actors.weights.words import changed_words, compare, read_note, write_note
from horizonrl.broker.weights.frames import digest_file
from horizonrl.broker.weights.layout import read_layout
from horizonrl.common.model_dir import weight_files
from horizonrl.ops.models.models import SMOLLM2, resolve_model
from tests.actors.engines.plain_worker import plain_worker


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, help="a directory of the hub's, in bfloat16 (SmolLM2-135M)"
    )
    parser.add_argument("--share", type=float, default=0.003, help="share of the words that change")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="horizonrl-bench-") as folder:
        measure(
            arguments.model or resolve_model(SMOLLM2),
            arguments.share,
            arguments.rounds,
            Path(folder),
        )


def measure(model_dir: Path, share: float, rounds: int, folder: Path) -> None:
    """Print what each way costs."""
    (source,) = weight_files(model_dir)
    old, new, note = folder / "old", folder / "new", folder / "note"
    data = np.fromfile(source, np.uint8)
    old.write_bytes(data)
    layout = read_layout(data)
    image_W = data[layout.data_offset :].view(np.uint16)
    changes_W = np.random.default_rng(0).random(len(image_W), np.float32) < share
    # Not zeros: a product of the smallest numbers is 0 on a CPU, which the probe would take for a stale layer.
    positions_W = np.flatnonzero(changes_W & (image_W & 0x7F80 != 0))
    image_W[positions_W] ^= 1
    new.write_bytes(data)
    write_note(note, layout, [(layout.data_offset, positions_W)])
    words = changed_words(new, positions_W)
    if words is None:
        raise SystemExit(f"a share of {share} is too much: engines load the whole file")
    worker = plain_worker(model_dir, folder / "meeting")
    with words:
        ways: dict[str, Callable[[], Any]] = {
            "digest the new image": lambda: digest_file(new),
            "compare two files": lambda: compare(old, new),
            "read the note of a patch": lambda: read_note(note),
            "make the file of words": lambda: changed_words(new, positions_W),
            "load the file": lambda: worker.load_frame(str(new)),
            "load the words": lambda: worker.load_words(str(new), str(path_of(words))),
            "probe": lambda: worker.probe_frame([str(new)], 1),
        }
        print(
            f"{len(positions_W)} of {len(image_W)} words changed; median [lowest, highest] of {rounds}"
        )
        for name, way in ways.items():
            print(f"{name:28}{timed(way, rounds)} CPU s", flush=True)
        seen = worker.probe_frame([str(new)], 1)
        print(
            f"probed: {seen['compared']} compared, stale {seen['stale']}, uncovered {seen['uncovered']}"
        )
        sizes = {
            "file": len(data),
            "words": path_of(words).stat().st_size,
            "note": note.stat().st_size,
        }
        print(*(f"{name}: {size / 1e6:.2f} MB" for name, size in sizes.items()), sep="\n")


def timed(work: Callable[[], Any], rounds: int) -> str:
    """Describe the CPU seconds of a call, which is made once before."""
    work()
    seconds = []
    for _ in range(rounds):
        began = time.process_time()
        work()
        seconds.append(time.process_time() - began)
    return f"{statistics.median(seconds):.3f} [{min(seconds):.3f}, {max(seconds):.3f}]"


if __name__ == "__main__":
    main()
