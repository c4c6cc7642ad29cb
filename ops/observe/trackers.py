"""Where a run's numbers can be shown beside its own files: TensorBoard, Weights & Biases, Trackio.

Place: journal → `ops/tracking` → **tracker**. A tracker takes points and keeps them; what to track, and that nothing is
tracked twice, is not its business. None needs an account: all write to this machine unless their own variables say
otherwise.
"""

import importlib.util
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from horizonrl.common.errors import MissingDependency

PROJECT = "horizonrl"
"""The project in wandb and trackio, unless WANDB_PROJECT or TRACKIO_PROJECT names another one."""


@dataclass(frozen=True, slots=True)
class Point:
    """Values of a run."""

    number: int
    """Of this point in its run; a point that comes again, after a kill at the wrong moment, has the same number."""
    step: int
    """Of an evaluation the one that it judges: an earlier one than that of the points around it."""
    time: float
    """When the run measured it, in seconds since the epoch: points may come long after."""
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """What a tracker knows of a run. A resumed learner continues the run of the same `identity`."""

    identity: str
    name: str
    directory: Path
    """For files of the tracker's own."""
    config: Mapping[str, Any]
    next_step: int
    """Steps from this one on have not been tracked, or not surely."""


class Tracker(Protocol):
    def track(self, point: Point) -> None:
        """Take a point; it outlives this process once the call returns."""

    def close(self) -> None:
        """Finish what is under way, and let go."""


class TensorBoard:
    """Event files, written by TensorBoard's own package."""

    def __init__(self, run: TrackedRun) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(run.directory), filename_suffix=f".{run.identity}")
        # What a killed process may have written beyond what it wrote down: readers forget it.
        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=run.next_step, session_log=start))

    def track(self, point: Point) -> None:
        values = [
            self._summary.Value(tag=name, simple_value=value)
            for name, value in point.values.items()
        ]
        summary = self._summary(value=values)
        self._writer.add_event(self._event(wall_time=point.time, step=point.step, summary=summary))
        # At once, since the caller notes the point as tracked as soon as this returns.
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """Weights & Biases; its files wait for `wandb sync`, unless WANDB_MODE sends them."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        mode = os.environ.get("WANDB_MODE", "offline")
        quiet = wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            disable_code=True,
            disable_job_creation=True,
        )
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run.name,
            id=run.identity,
            resume="allow" if mode == "online" else None,
            mode=mode,
            dir=str(run.directory),
            config=dict(run.config),
            # A resumed run may have another config, for example more steps.
            allow_val_change=True,
            settings=quiet,
        )
        # Its own steps may only grow: an evaluation comes late.
        self._run.define_metric("*", step_metric="step")

    def track(self, point: Point) -> None:
        row = {**point.values, "step": point.step, "_timestamp": point.time}
        self._run.log(row, step=point.number, commit=True)

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """Trackio's database on this machine, or the Space or server that its own environment variables name."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        self._run: Any = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=f"{run.name}-{run.identity}",
            resume="allow",
            config=dict(run.config),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def track(self, point: Point) -> None:
        # It takes no time: its points have that of this call.
        self._run.log(dict(point.values), step=point.step)

    def close(self) -> None:
        self._run.finish()


TRACKERS: dict[str, type[TensorBoard] | type[Wandb] | type[Trackio]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
}
"""By `tracker.kind`, which is the name of the package as well."""


def require(kind: str | None) -> None:
    """Raise MissingDependency when a tracker's package is not installed."""
    if kind is not None and importlib.util.find_spec(kind) is None:
        raise MissingDependency(
            f"tracker.kind is {kind!r}, whose package is not installed: pip install 'horizonrl[{kind}]', or set "
            "tracker.kind to none"
        )
