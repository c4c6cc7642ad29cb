"""`horizonrl bench memory`: where the learner's memory goes, and how it grows with the length of an episode.

One process, one thread, the backend `torch`: its resident memory before the engine, with it, and at most during a step
of one episode of each length. `learner.micro_batch_tokens` is the longest of them, the least that it can be.
"""

import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horizonrl.learner.algorithm.batch import Batch
from horizonrl.ops.bench.speed.learner import PROMPT_TOKENS, RATE, make_batch
from horizonrl.ops.models.tiny_model import make_tiny_model

TURN_TOKENS, READ_TOKENS = 96, 32
"""What a turn generates, and what the episode reads after it."""


@dataclass(frozen=True, slots=True)
class Resident:
    """Resident memory of this process, in bytes."""

    now: int
    shared_out: int
    """The same, with each page that several processes hold divided among them."""
    peak: int
    """The most since `forget_peak`."""


def run(tokens: Sequence[int], model: str | None = None, json_file: Path | None = None) -> int:
    """Measure, print a table, and write it to `json_file`; return an exit code."""
    with tempfile.TemporaryDirectory(prefix="horizonrl-bench-") as directory:
        found = measure(_model_dir(model, Path(directory)), sorted(tokens))
    for row in found:
        figures = [
            f"{name.removesuffix('_bytes')} {value / 1e9:.2f} GB"
            for name, value in row.items()
            if name.endswith("_bytes")
        ]
        print(f"{row['what']:<24}{'  '.join(figures)}" + (f"  {row['step_s']:.1f} s" if "step_s" in row else ""))
    if json_file is not None:
        json_file.write_text(json.dumps({"rows": found}, indent=2) + "\n", encoding="utf-8")
    return 0


def measure(model_dir: Path, tokens: Sequence[int]) -> list[dict[str, Any]]:
    """Return a row before the engine, one with it, and one per length of an episode, shortest first."""
    from horizonrl.learner.engine.api import EngineSettings
    from horizonrl.learner.engine.registry import make_engine

    before = resident()
    engine = make_engine(EngineSettings(model_dir, backend="torch", micro_batch_tokens=max(tokens)))
    rows: list[dict[str, Any]] = [_row("before the engine", before), _row("with the engine", resident())]
    # The first step makes what stays: compiled kernels, and the pages of the optimizer's state.
    engine.train_step(episode(256), RATE)
    for length in tokens:
        batch = episode(length)
        forget_peak()
        start, began = resident(), time.perf_counter()
        engine.train_step(batch, RATE)
        row = _row(f"an episode of {length:,}", resident())
        row |= {"step_s": time.perf_counter() - began, "tokens": length}
        rows.append(row | {"step_bytes": row["peak_bytes"] - start.now})
    engine.close()
    return rows


def episode(tokens: int) -> Batch:
    """Return a batch of one episode of random ids."""
    turns = max(1, -(-(tokens - PROMPT_TOKENS) // (TURN_TOKENS + READ_TOKENS) * 5 // 4))
    (trace, *_) = make_batch(1, turns=turns, generated=TURN_TOKENS, observed=READ_TOKENS).traces
    cut = {
        name: getattr(trace, name)[:tokens] for name in ("ids_L", "turns_L", "logprobs_L", "versions_L", "rewards_L")
    }
    return Batch((type(trace)(**cut, group=0),), version=1)


def resident() -> Resident:
    """Read what Linux counts for this process."""
    rollup = _kilobytes(Path("/proc/self/smaps_rollup"))
    return Resident(rollup["Rss"], rollup["Pss"], _kilobytes(Path("/proc/self/status"))["VmHWM"])


def forget_peak() -> None:
    """Let `Resident.peak` begin anew (proc(5), `clear_refs`)."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def _kilobytes(path: Path) -> dict[str, int]:
    lines = (line.split() for line in path.read_text(encoding="utf-8").splitlines())
    return {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines if line[-1:] == ["kB"]}


def _row(what: str, found: Resident) -> dict[str, Any]:
    return {"what": what, "rss_bytes": found.now, "pss_bytes": found.shared_out, "peak_bytes": found.peak}


def _model_dir(model: str | None, directory: Path) -> Path:
    if model is None:
        return make_tiny_model(directory / "model")
    from horizonrl.ops.models.models import resolve_model

    return resolve_model(model)
