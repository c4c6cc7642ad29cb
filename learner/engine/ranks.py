"""Several ranks as one engine: rank 0 calls, the others follow.

`Leader` is the Engine of rank 0: it broadcasts every call as one MessagePack command and then makes it on the local
engine. `follow` is the loop of every other rank. Nothing is pickled. Commands travel over a gloo group of their
own, on the CPU: an idle learner waits long for its next batch, while a collective inside a step has a short deadline.
"""

from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import torch
import torch.distributed as dist

from horizonrl.common.errors import RunFailed
from horizonrl.learner.algorithm.batch import Batch, Trace
from horizonrl.learner.engine.api import Engine, StepStats

IDLE_LIMIT = timedelta(days=1)
"""Longest silence between two commands. A leader that dies closes its connections, which ends the wait at once."""

_COLUMNS = {
    "ids_L": "<i4",
    "turns_L": "<i4",
    "logprobs_L": "<f4",
    "versions_L": "<i4",
    "rewards_L": "<f4",
    "rewards_K": "<f4",
}
_FACTS = ("group", "demo", "truncated", "states", "episode")


class Leader:
    """Rank 0's Engine: all ranks make every call of it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._group = _command_group()

    def train_step(self, batch: Batch, lr: float) -> StepStats:
        self._order("train_step", batch=encode_batch(batch), lr=lr)
        # After the order: the followers have to be on their way into the same collectives.
        return self._engine.train_step(batch, lr)

    def logprob_gap_at(self, trace: Trace, version: int, weights: Path) -> float:
        # A model of rank 0 alone: no other rank takes part.
        return self._engine.logprob_gap_at(trace, version, weights)

    def write_weights(self, path: Path) -> str:
        return self.begin_write_weights(path).result()

    def begin_write_weights(self, path: Path) -> Future[str]:
        self._order("write_weights", path=str(path))
        return self._engine.begin_write_weights(path)

    def save(self, directory: Path, state: dict[str, Any]) -> None:
        self._order("save", directory=str(directory))
        self._engine.save(directory, state)

    def load(self, directory: Path) -> dict[str, Any]:
        self._order("load", directory=str(directory))
        return self._engine.load(directory)

    def close(self) -> None:
        self._order("close")
        self._engine.close()

    def _order(self, call: str, **arguments: Any) -> None:
        _broadcast(msgpack.packb({"call": call, **arguments}), self._group)


def follow(engine: Engine) -> None:
    """Make rank 0's calls on this rank's engine until it closes.

    Takes: commands. Gives: nothing but collectives. Waits for: the next command, `IDLE_LIMIT` long. Woken by: a
    command, or the end of rank 0's process, which is an error.
    """
    group = _command_group()
    while True:
        command = msgpack.unpackb(_broadcast(None, group))
        match command["call"]:
            case "train_step":
                engine.train_step(decode_batch(command["batch"]), command["lr"])
            case "write_weights":
                engine.write_weights(Path(command["path"]))
            case "save":
                # Rank 0 alone writes the learner's state; the others only take part in the gathering.
                engine.save(Path(command["directory"]), {})
            case "load":
                engine.load(Path(command["directory"]))
            case "close":
                return engine.close()
            case unknown:
                raise RunFailed(f"rank 0 orders {unknown!r}: start all ranks from the same release")


def encode_batch(batch: Batch) -> dict[str, Any]:
    """Turn a batch into plain values and bytes; `decode_batch` restores it bit for bit."""
    traces = [
        {
            name: np.asarray(getattr(trace, name), dtype).tobytes()
            for name, dtype in _COLUMNS.items()
        }
        | {name: getattr(trace, name) for name in _FACTS}
        for trace in batch.traces
    ]
    return {"version": batch.version, "traces": traces}


def decode_batch(encoded: dict[str, Any]) -> Batch:
    traces = [
        Trace(
            **trace
            | {"states": tuple(trace["states"])}
            | {name: np.frombuffer(trace[name], dtype) for name, dtype in _COLUMNS.items()}
        )
        for trace in encoded["traces"]
    ]
    return Batch(traces=tuple(traces), version=encoded["version"])


def _command_group() -> Any:
    dist.barrier()  # under the engine's short deadline, as `new_group` would wait for a missing rank with its own
    return dist.new_group(backend="gloo", timeout=IDLE_LIMIT)


def _broadcast(command: bytes | None, group: Any) -> bytes:
    """Send rank 0's bytes to all ranks and return them: first their number, then the bytes."""
    # A broadcast fills a tensor that exists, so the followers have to learn its size first.
    length = torch.tensor([len(command or b"")], dtype=torch.int64)
    dist.broadcast(length, src=0, group=group)
    content = torch.empty(int(length), dtype=torch.uint8)
    if command is not None:
        # A bytearray, because torch warns of a buffer that it may not write to.
        content.copy_(torch.frombuffer(bytearray(command), dtype=torch.uint8))
    dist.broadcast(content, src=0, group=group)
    return content.numpy().tobytes()
