"""Ranks of a learner that count their tensors: `python rank_memory.py MODEL_DIR` prints the bytes of each stage."""

import gc
import json
import os
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from tests.learner.ranks_program import ROOT, place
from tests.namespaces import HERE

DEADLINE_S = 300.0
TOKENS = 32
"""Of a micro-batch, which one trace fills: states outweigh activations as they do at full size."""
ZERO = {
    "reduce_bucket_size": 100_000,
    "stage3_max_live_parameters": 200_000,
    "stage3_max_reuse_distance": 0,
    "stage3_param_persistence_threshold": 500,
    "stage3_prefetch_bucket_size": 20_000,
}
"""As far below the model as DeepSpeed's own sizes are below a large one."""


def counted(model_dir: Path, ranks: int) -> dict[str, Any]:
    """Return what rank 0 of `ranks` counted, by the stage."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank in range(ranks):
        _, variables = place(rank, HERE, (HERE,) * ranks, port)
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
        command = [sys.executable, __file__, str(model_dir)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        processes.append(subprocess.Popen(command, env=environment, text=True, **pipes))
    try:
        outputs = [process.communicate(timeout=DEADLINE_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert not any(process.returncode for process in processes), outputs
    figures: dict[str, Any] = json.loads(outputs[0][0].splitlines()[-1])
    return figures


def main(model_dir: Path) -> dict[int, Any]:
    import torch.distributed as dist

    from tests.ops.plan.live_bytes import LiveBytes

    live = LiveBytes()
    scatter = dist.reduce_scatter_tensor

    def scatter_apart(*tensors: Any, **options: Any) -> Any:
        # gloo copies what it is given; NCCL, which the plan is for, does not.
        phase, live.phase = live.phase, "gloo"
        try:
            return scatter(*tensors, **options)
        finally:
            live.phase = phase

    dist.reduce_scatter_tensor = scatter_apart
    return {stage: count(live, model_dir, stage) for stage in range(4)}


def count(live: Any, model_dir: Path, stage: int) -> dict[str, Any]:
    """Take two steps; return the bytes between them, by type, and the most of the second one."""
    from horizonrl.learner.engine.api import EngineSettings
    from horizonrl.learner.engine.registry import make_engine
    from tests.ops.plan.live_bytes import live_tensors

    before = {tensor.untyped_storage()._cdata for tensor in live_tensors()}
    settings = {
        "zero_stage": stage,
        "deepspeed": {"zero_optimization": ZERO},
        "collective_timeout_s": 60,
    }
    engine: Any = make_engine(EngineSettings(model_dir, micro_batch_tokens=TOKENS, **settings))
    engine.train_step(batch(engine.ranks), 1e-4)
    held = [tensor for tensor in live_tensors() if tensor.untyped_storage()._cdata not in before]
    live.begin(held)
    types: Counter[str] = Counter()
    for storage, dtype in {
        t.untyped_storage()._cdata: (t.untyped_storage(), t.dtype) for t in held
    }.values():
        types[str(dtype)] += storage.nbytes()
    del held
    with live:
        engine.train_step(batch(engine.ranks), 1e-4)
    engine.close()
    del engine
    gc.collect()
    return {"held": types, "peak": live.peaks[""]}


def batch(ranks: int) -> Any:
    """Return three micro-batches for each rank."""
    from horizonrl.learner.algorithm.batch import Batch
    from tests.learner.traces import make_trace

    rng = np.random.default_rng(0)
    return Batch(
        tuple(make_trace(rng, TOKENS, version=1, group=index // 2) for index in range(6 * ranks)), 1
    )


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
