"""Training from a program: the processes of `horizonrl train`, with a handle on them."""

import subprocess
from collections.abc import Iterator
from contextlib import suppress
from types import TracebackType
from typing import Self

from horizonrl.common.config.arguments import checked
from horizonrl.common.config.schema import RunConfig
from horizonrl.common.run_dir import LOGS
from horizonrl.ops.api.programs import RunningCommand
from horizonrl.ops.api.run import Run, RunEvent, open_run
from horizonrl.ops.rundir.directory import note_holder, train_lock

OUTPUT = "train.txt"
"""In `logs/`: what `horizonrl train` prints."""


class LiveRun(Run):
    """A run that this process has started. As a context manager it is stopped at the end of the body."""

    def __init__(self, config: RunConfig, program: RunningCommand) -> None:
        super().__init__(config.run_dir)
        self.__dict__["config"] = config  # the directory has none until the parts start
        self.program = program

    @property
    def running(self) -> bool:
        return self.program.running

    def follow(self, after_step: int = 0) -> Iterator[RunEvent]:
        """Yield each step and evaluation as it comes, and return when training has ended and exported its model.

        Raises RunFailed or ConfigError if training failed.
        """
        yield from super().follow(after_step)
        self.program.wait()

    def wait(self, timeout_s: float | None = None) -> Run:
        """Wait for the end of training; return the run. Raises as `RunningCommand.wait` does."""
        self.program.wait(timeout_s)
        return open_run(self.directory)

    def stop(self) -> None:
        """End training; every process has ended when this returns. `start` with the same config resumes."""
        self.program.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _lives(self) -> bool:
        return self.running

    def _wait(self, seconds: float) -> None:
        with suppress(subprocess.TimeoutExpired):  # the end of training ends the wait at once
            self.program.process.wait(seconds)


@checked
def start(config: RunConfig) -> LiveRun:
    """Start training on this machine, as `horizonrl train` does: broker, controller, learner and actors.

    Returns at once. The processes end with this one; the same call resumes the run. What they print is in
    `logs/train.txt` of the run directory. Raises RunFailed if the run is in training already.
    """
    with train_lock(config.run_dir) as lock:
        program = RunningCommand.start(["train"], config.run_dir / LOGS / OUTPUT, config, lock)
        note_holder(lock, program.process.pid)
    return LiveRun(config, program)


@checked
def train(config: RunConfig) -> Run:
    """Train to the last step and return the finished run. Raises RunFailed or ConfigError if training failed.

    An interrupt (Ctrl-C) ends the processes, and the same call resumes.
    """
    with start(config) as run:
        return run.wait()
