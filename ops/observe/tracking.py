"""`horizonrl track`: send a run's journal to a tracker, every point once.

Flow: journal → **tracking** → tracker. Tracking is a process of its own, so the learner neither waits for a tracker nor
fails with it. It reads only up to the newest checkpoint, because a resumed learner cannot roll back those steps. So no
point is ever tracked that is rolled back later.
"""

import asyncio
import json
import math
import os
import secrets
import signal
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from horizonrl.common.config.schema import RunConfig
from horizonrl.common.errors import ConfigError, RunFailed
from horizonrl.common.files import atomic_write_text
from horizonrl.common.locks import take_lock
from horizonrl.common.logs import configure_logs, get_logger
from horizonrl.common.metrics import Metrics
from horizonrl.common.processes import Child, horizonrl_command
from horizonrl.common.quantities import OWN
from horizonrl.common.run_dir import CHECKPOINTS
from horizonrl.common.types import Phase
from horizonrl.ops.observe.trackers import TRACKERS, Point, TrackedRun, Tracker, require
from horizonrl.ops.rundir.directory import public_config, read_config
from horizonrl.ops.rundir.files import JournalReader, Line, Stage
from horizonrl.ops.rundir.finished import newest_checkpoint

log = get_logger()

POLL_S = 2.0
"""Seconds between two looks for a new checkpoint."""
END_S = 10.0
"""Seconds a tracker may take to end with the learner. The next start, or `horizonrl track`, sends what is left."""
_NOT_TRACKED = (
    "version",
    "step",
    "phase_step",
    "time",
    "oldest_version",
    "newest_version",
    "settled_step",
)
"""Numbers of a line that say which step it is, and measure nothing."""


@dataclass(frozen=True)
class Tracked:
    """What has been tracked. It is on disk, so no later process tracks it again."""

    identity: str = field(default_factory=lambda: secrets.token_hex(4))
    points: int = 0
    step: int = 0
    """All metrics up to this step."""
    evaluations: list[str] = field(default_factory=list)
    """The first ticket of each evaluation."""

    @classmethod
    def read(cls, path: Path) -> "Tracked":
        return cls(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else cls()

    def write(self, path: Path) -> None:
        # Whole: a kill in the middle of a write would lose the identity, and the tracker would show a second run.
        atomic_write_text(path, json.dumps(asdict(self)))


class Tracking:
    """One run's way into one tracker."""

    def __init__(self, config: RunConfig, run_dir: Path) -> None:
        self._config, self._run_dir = config, run_dir
        self._file = run_dir / "tracker" / f"{config.tracker.kind}.json"
        self.tracked = Tracked.read(self._file)
        self.tracked.write(self._file)  # the identity, before anything is tracked under it
        self._journal = JournalReader(run_dir, ("metrics", "evals"))

    def catch_up(self, tracker: Tracker) -> int:
        """Track what has become safe since the last call; return how many points."""
        upto, earlier = self._final(), self.tracked
        files = self._journal.read()
        # A new process reads the files from their beginning, and so meets what an earlier one has tracked. In the
        # order in which the run wrote them: at an equal step an evaluation comes first.
        lines = [(line["settled_step"], 0, line) for line in files.evals]
        lines += [(line["step"], 1, line) for line in files.metrics if line["step"] > earlier.step]
        for step, is_metrics, line in sorted(lines, key=itemgetter(0, 1)):
            if step > upto:
                break
            if is_metrics:
                self._track(tracker, line, metrics_values(line), step=step)
            # A ticket id never returns in a run. A version may, after a resume.
            elif (first_ticket := line["ends"][0][1]) not in earlier.evaluations:
                stage = files.stage(line, self._config.total_steps)
                evaluations = [*self.tracked.evaluations, first_ticket]
                self._track(tracker, line, evaluation_values(stage), evaluations=evaluations)
        return self.tracked.points - earlier.points

    def _final(self) -> float:
        """Return the step up to which no resumed learner can roll back the journal."""
        # A learner makes the folder before its first step: without it, a study has removed those of a finished run.
        if not (self._run_dir / CHECKPOINTS).is_dir():
            return math.inf
        newest = newest_checkpoint(self._run_dir)
        step = 0 if newest is None else newest.step
        # The last evaluation settles after the last step.
        return math.inf if step >= self._config.total_steps else step

    def _track(
        self, tracker: Tracker, line: Line, values: Mapping[str, float], **note: Any
    ) -> None:
        # Tracked first, noted after: a kill in between repeats the point under the same number, and loses none.
        tracker.track(Point(self.tracked.points, line["version"], line["time"], values))
        self.tracked = replace(self.tracked, points=self.tracked.points + 1, **note)
        self.tracked.write(self._file)


def metrics_values(line: Line) -> dict[str, float]:
    """Return what is tracked of a step: `train/loss`, `train/success_rate`, `horizon/ENV`, `own/NUMBER`, and so on.

    In imitation all of it is under `imitation/`: the episodes are an expert's and not the policy's.
    """
    is_rl = line["phase"] == Phase.RL.value
    prefix = "" if is_rl else "imitation/"
    of_loss = {name.removeprefix(OWN): line[name] for name in line if name.startswith(OWN)}
    measured = {name: value for name, value in line.items() if not name.startswith(OWN)}
    values = numbers(measured, "train" if is_rl else "imitation")
    values |= numbers(line["horizons"], f"{prefix}horizon") | numbers(of_loss, f"{prefix}own")
    for env, outcome in line["environments"].items():
        values |= numbers(outcome, f"{prefix}env/{env}")
    return values


def evaluation_values(stage: Stage) -> dict[str, float]:
    """Return what is tracked of an evaluation: `eval/success_rate`, its interval, pass@k, each environment's.

    Its success is also under the stage that it judges: `eval/before_training`, `eval/after_imitation`, `eval/after_rl`.
    """
    line = stage.line
    values = {"eval/version": float(line["version"])} | _result_values(line, "eval")
    values |= numbers({stage.key: line["success_rate"]}, "eval")
    for env, measured in line["environments"].items():
        values |= _result_values(measured, f"eval/{env}")
        for category, part in measured["categories"].items():
            values |= numbers(part, f"eval/{env}/{category}")
    return values


def _result_values(measured: Mapping[str, Any], prefix: str) -> dict[str, float]:
    return numbers(measured, prefix) | numbers(measured["pass_at"], f"{prefix}/pass_at")


def numbers(values: Mapping[str, Any], prefix: str) -> dict[str, float]:
    """Return the measurements among some values. What was not measured and what is not a number is left out."""
    return {
        f"{prefix}/{name}": float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and name not in _NOT_TRACKED
    }


def track(run_dir: Path, overrides: Sequence[str], *, follow: bool) -> int:
    """Track what a run has written; with `follow`, keep going until SIGTERM. Return 0."""
    config = read_config(run_dir, overrides)
    if config.tracker.kind is None:
        raise ConfigError(
            "tracker.kind is none: set it, for example with --tracker.kind tensorboard"
        )
    require(config.tracker.kind)
    stopping = threading.Event()
    if follow:
        configure_logs(run=config.run.name, role="tracker")
        os.nice(10)  # the learner on the same machine comes first
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stopping.set())
    directory = run_dir / "tracker"
    # A restarted learner's tracker waits for the one before it, which may still be sending.
    with _only_tracker(directory, wait=follow):
        tracking = Tracking(config, run_dir)
        tracker = TRACKERS[config.tracker.kind](_tracked_run(config, directory, tracking.tracked))
        count = 0
        while True:
            # Asked before the last look, so that a full look follows the signal: the last checkpoint may just have
            # come.
            ending = stopping.is_set() or not follow
            count += tracking.catch_up(tracker)
            if ending:
                break
            stopping.wait(POLL_S)
        tracker.close()
    print(
        f"{config.tracker.kind}: {count} points of {config.run.name} tracked, in all to step {tracking.tracked.step}"
    )
    return 0


def _tracked_run(config: RunConfig, directory: Path, tracked: Tracked) -> TrackedRun:
    folder = directory / str(config.tracker.kind)
    folder.mkdir(exist_ok=True)
    return TrackedRun(
        identity=tracked.identity,
        name=config.run.name,
        directory=folder,
        config=public_config(config),
        next_step=tracked.step + 1,
    )


@contextmanager
def _only_tracker(directory: Path, *, wait: bool) -> Iterator[None]:
    """Hold a run's tracker directory; a second tracker waits, or raises RunFailed, while another one holds it."""
    directory.mkdir(exist_ok=True)
    with (directory / "lock").open("w", encoding="utf-8") as file:
        if not take_lock(file, wait=wait):
            raise RunFailed(f"{directory} is already being tracked by the run's learner")
        yield


@asynccontextmanager
async def tracked(config: RunConfig, metrics: Metrics) -> AsyncIterator[None]:
    """Track the run in a process of its own while the body runs. A failure is logged and counted, and changes nothing.

    The process is not restarted: the learner's next start, or `horizonrl track`, sends what is left.
    """
    # One tracker per run, however many ranks the learner has.
    if config.tracker.kind is None or os.environ.get("RANK", "0") != "0":
        yield
        return
    async with asyncio.TaskGroup() as group:
        stop = asyncio.Event()
        group.create_task(_beside(config, metrics, stop))
        try:
            yield
        finally:
            stop.set()


async def _beside(config: RunConfig, metrics: Metrics, stop: asyncio.Event) -> None:
    """Start the tracker's process, wait for its end or for `stop`, and end it."""
    log_file = config.run_dir / "logs" / "tracker.log"
    # Ctrl-C reaches the learner alone, which ends the tracker after its own last checkpoint.
    tracker = Child(horizonrl_command("track", str(config.run_dir), "--follow"), log_file, END_S)
    try:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        await tracker.start()
    except OSError as error:
        _report_failure(metrics, str(error), log_file)
        return
    ended, stopped = asyncio.ensure_future(tracker.wait()), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((ended, stopped), return_when=asyncio.FIRST_COMPLETED)
        await tracker.stop()
    finally:
        stopped.cancel()
        tracker.send(signal.SIGKILL)  # after an error of the learner
        code = await ended
    if code != 0:
        _report_failure(metrics, f"it ended with code {code}", log_file)


def _report_failure(metrics: Metrics, reason: str, log_file: Path) -> None:
    metrics.count("tracker_failures_total")
    log.error(
        "tracker_failed",
        reason=reason,
        log=str(log_file),
        mend="horizonrl track RUN_DIR tracks what is missing",
    )
