"""Where the learner's memory goes, and how it grows with the length of an episode.

One process, one thread, the backend `torch`: its resident memory before the engine, with it, and at most during a step
of one episode of each length. `learner.micro_batch_tokens` is the longest of them, the least that it can be.
"""

import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

from horizonrl.learner.algorithm.batch import Batch
from horizonrl.ops.bench.case import Case, Request, Side, require
from horizonrl.ops.bench.learner import PROMPT_TOKENS, RATE, make_batch

LENGTHS, SMALL_LENGTHS = (4096, 8192, 16_384, 32_768), (512, 1024)
TURN_TOKENS, READ_TOKENS = 96, 32
"""What a turn generates, and what the episode reads after it."""


async def cases(request: Request) -> AsyncIterator[Case]:
    """Yield a case before the engine, one with it, and one per length of an episode."""
    require("torch")
    from horizonrl.learner.engine.api import EngineSettings
    from horizonrl.learner.engine.registry import make_engine

    lengths = SMALL_LENGTHS if request.small else LENGTHS
    model_dir = request.model_dir(tiny=True)
    yield Case("learner before the engine", {"ours": _resident}, rounds=1)
    engine = make_engine(
        EngineSettings(model_dir, backend="torch", micro_batch_tokens=max(lengths))
    )
    yield Case("learner with the engine", {"ours": _resident}, rounds=1)
    # The first step makes what stays: compiled kernels, and the pages of the optimizer's state.
    engine.train_step(episode(256), RATE)
    for tokens in lengths:
        step = _step(lambda batch: engine.train_step(batch, RATE), episode(tokens))
        yield Case(f"learner step of an episode of {tokens:,} tokens", {"ours": step}, rounds=1)
    engine.close()


async def _resident() -> Mapping[str, float]:
    return {"MiB": _kilobytes(Path("/proc/self/smaps_rollup"))["Rss"] / 1024}


def _forget_peak() -> None:
    """Let the peak begin anew (proc(5), `clear_refs`)."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def _step(train: Callable[[Batch], object], batch: Batch) -> Side:
    async def side() -> Mapping[str, float]:
        _forget_peak()
        began, before = time.perf_counter(), (await _resident())["MiB"]
        train(batch)
        peak = _kilobytes(Path("/proc/self/status"))["VmHWM"] / 1024
        return {"MiB": peak, "MiB more": peak - before, "s": time.perf_counter() - began}

    return side


def episode(tokens: int) -> Batch:
    """Return a batch of one episode of random ids."""
    turns = max(1, -(-(tokens - PROMPT_TOKENS) // (TURN_TOKENS + READ_TOKENS) * 5 // 4))
    (trace, *_) = make_batch(1, turns=turns, generated=TURN_TOKENS, observed=READ_TOKENS).traces
    cut = {
        name: getattr(trace, name)[:tokens]
        for name in ("ids_L", "turns_L", "logprobs_L", "versions_L", "rewards_L")
    }
    return Batch((type(trace)(**cut, group=0),), version=1)


def _kilobytes(path: Path) -> dict[str, int]:
    lines = (line.split() for line in path.read_text(encoding="utf-8").splitlines())
    return {line[0].rstrip(":"): int(line[1]) for line in lines if line[-1:] == ["kB"]}
