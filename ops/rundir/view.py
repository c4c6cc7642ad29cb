"""One run at one moment: is it over, is it learning, is it moving, what waits for what, what broke.

Place in the flow: run directory and broker → **RunView** → console, status, report, live page, trackers, API and cards,
which only render it. Either half may be missing: a stopped run has no broker, and a run on another machine has no files
here.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from horizonrl.common.config.schema import RunConfig
from horizonrl.common.run_dir import CHECKPOINTS, TRAIN_LOCK
from horizonrl.common.state import Outcomes, Progress, end_of_run
from horizonrl.common.statistics import mean
from horizonrl.common.types import Kind, Phase
from horizonrl.ops.rundir import trained_by_duration
from horizonrl.ops.rundir.broker_status import BrokerStatus, waits
from horizonrl.ops.rundir.directory import in_training
from horizonrl.ops.rundir.files import RECENT, SETTLED, Files, Stage, evaluated_split
from horizonrl.ops.rundir.troubles import Trouble
from horizonrl.ops.terminal.figures import count_noun, duration, percent

SILENT_S = 600.0
"""Seconds without a report after which a learner is called silent: it may be in a long step, or gone."""
NO_ANSWER_S = 15.0
"""Seconds without an answer of the broker after which that is said."""
FRESH_S = 60.0
"""Seconds without growth after which a checkpoint counts as abandoned: its writer has died."""


@dataclass(frozen=True)
class RunView:
    name: str
    config: RunConfig | None = None
    """None if only the broker is known and no recipe was given."""
    run_dir: Path | None = None
    files: Files = field(default_factory=Files)
    broker: BrokerStatus | None = None
    """None if no broker answers."""
    troubles: Sequence[Trouble] = ()
    """What broke, the latest first."""
    training: bool | None = None
    """Whether a `train` works in the run directory; None if none ever did, since then the roles run elsewhere."""
    now: float = field(default_factory=time.time)

    @classmethod
    def read(cls, run_dir: Path, config: RunConfig, files: Files | None = None) -> "RunView":
        """Return what a run directory says, without its broker; `files` are its journal, if that has been read."""
        training = in_training(run_dir) if (run_dir / TRAIN_LOCK).exists() else None
        journal = Files.read(run_dir) if files is None else files
        return cls(config.run.name, config, run_dir, journal, training=training)

    @property
    def progress(self) -> Progress | None:
        """How far the run is according to its learner, if the broker answers."""
        return self.broker.progress if self.broker else None

    @property
    def step(self) -> int:
        # Either half may be missing or behind: files of another machine, or a broker that has ended.
        return max(self.progress.step if self.progress else 0, self.files.step)

    @property
    def steps(self) -> int | None:
        return self.config.total_steps if self.config else None

    @property
    def share(self) -> float | None:
        return min(1.0, self.step / self.steps) if self.steps else None

    @property
    def finished(self) -> bool:
        """Whether every step is taken and evaluated: by the learner's report if there is one, else by the files."""
        steps = self.steps or 0
        if self.progress is not None:
            return end_of_run(steps, self.progress) is not None
        # The last evaluation settles after the last step.
        rounds = self.config.eval_rounds if self.config else 0
        return bool(self.files.metrics) and self.step >= steps and len(self.files.evals) >= rounds

    @property
    def ended(self) -> bool:
        """Whether no further step will come unless somebody starts the run again."""
        return self.finished or self.training is False

    @property
    def state(self) -> str:
        """finished, running, silent for 3 h, stopped, or no learner yet."""
        if self.finished:
            return "finished"
        if self.progress is not None and not self.progress.finished:
            return (
                f"silent for {duration(self.silent_s)}" if self.silent_s > SILENT_S else "running"
            )
        if self.broker is not None:
            return "no learner yet"
        return "running" if self.training else "stopped"

    @property
    def silent_s(self) -> float:
        """Seconds since the learner's last report."""
        return self.broker.silent_s if self.broker else 0.0

    @property
    def phase(self) -> str | None:
        if self.progress is not None:
            return self.progress.phase.value
        return str(self.files.metrics[-1]["phase"]) if self.files.metrics else None

    @property
    def horizons(self) -> Mapping[str, int]:
        """The turns allowed now, by environment."""
        turns: Mapping[str, int] = self.files.metrics[-1]["horizons"] if self.files.metrics else {}
        return (self.broker.horizons if self.broker else {}) or turns

    @property
    def stages(self) -> list[Stage]:
        """Held-out success before training, after imitation and after RL, as far as they were measured."""
        return self.files.stages(self.steps)

    @property
    def gain(self) -> str:
        """What imitation and RL added: `0 % before training, 13 % after imitation, 85 % after RL`."""
        return ", ".join(map(str, self.stages))

    @property
    def tests(self) -> int:
        """How often `test` was played: by `horizonrl eval`, or by the run's own evaluations."""
        rounds = [line for line in self.files.evals if evaluated_split(line) == "test"]
        return len(self.files.tests) + len(rounds)

    @cached_property
    def outcomes(self) -> Mapping[Kind, Outcomes]:
        """How the tickets of each kind ended: by the learner's report if there is one, else by the files."""
        if self.broker is not None:
            return self.broker.outcomes
        outcomes = {}
        for kind, ends in self.files.end_counts().items():
            dropped = {reason: count for reason, count in ends.items() if reason not in SETTLED}
            outcomes[kind] = Outcomes(**{end: ends[end] for end in SETTLED}, dropped=dropped)
        return outcomes

    def accounts(self) -> Iterator[tuple[Kind, str]]:
        """Yield each kind of which tickets were issued, with their ends in words."""
        for kind, ends in self.outcomes.items():
            text = _ends_text(kind, ends)
            if self.broker is None:
                if ends.settled:
                    yield kind, text
            elif issued := self.broker.issued[kind]:
                yield kind, f"{issued} issued = {text} + {issued - ends.settled} outstanding"

    @property
    def seconds_left(self) -> float | None:
        """The time to the end of the present phase, at the pace of its last steps; None before it has had one.

        By the steps' own times and not by the clock: a run may have stood still between two of them.
        """
        if self.config is None:
            return None
        phase, done = self.config.phase(self.step)
        lines = self.files.rl if phase is Phase.RL else self.files.imitation
        pace = mean([line["step_s"] + line["wait_s"] for line in lines[-RECENT:]])
        steps = self.config.rl.steps if phase is Phase.RL else self.config.imitation.steps
        return None if pace is None else pace * (steps - done)

    @property
    def time_left(self) -> str:
        """How long it takes from here: to the end of imitation while that lasts, as RL's pace is not known yet."""
        seconds = self.seconds_left
        if self.config is None or seconds is None or self.step >= self.config.total_steps:
            return ""
        is_before_rl = (
            self.config.phase(self.step)[0] is Phase.IMITATION and self.config.rl.steps > 0
        )
        return f"about {duration(seconds)} {'of imitation ' if is_before_rl else ''}left"

    def waits(self) -> list[str]:
        """Say who waits for what."""
        if self.broker is None:
            return ["the broker does not answer"] if self.training and not self.finished else []
        sentences = waits(self.broker, self.config, self.files.metrics if self.run_dir else None)
        if self.now - self.broker.looked_at > NO_ANSWER_S:
            sentences.append(
                f"the broker has not answered for {duration(self.now - self.broker.looked_at)}"
            )
        return sentences

    def checkpoint(self) -> str | None:
        """Say which checkpoint is being written, and how far it is compared with the one before."""
        return (
            None
            if self.run_dir is None
            else _checkpoint_in_writing(self.run_dir / CHECKPOINTS, self.now)
        )

    def broken(self) -> list[str]:
        """Say what broke, the latest first, and where to read about it."""
        sentences = [
            f"{trouble.when(self.now)}{f': {trouble.detail}' if trouble.detail else ''}"
            for trouble in self.troubles
        ]
        if (share := self.error_share) > 0:
            sentences.append(
                f"{percent(share)} of the last steps' episodes broke: environment or engine errors"
            )
        if (unequal := trained_by_duration.warning(self.files.metrics)) is not None:
            sentences.append(unequal)
        if self.broker is not None and self.broker.dead:
            messages = count_noun(self.broker.dead, "message")
            sentences.append(f"{messages} refused (stream {self.name}_DEAD says why)")
        if self.broker is not None and self.broker.log.full and not self.finished:
            log = self.broker.log
            sentences.append(
                f"the group log is full: {log.stored_bytes:,} of broker.max_log_bytes = {log.limit_bytes:,}"
            )
        if resumes := sum(line["lineage"] > 0 for line in self.files.lineages):
            sentences.append(f"the learner has resumed {count_noun(resumes, 'time')}")
        return sentences

    @property
    def error_share(self) -> float:
        """The share of the last steps' episodes that broke."""
        lines = self.files.metrics[-RECENT:]
        episodes = sum(line["episodes"] for line in lines)
        broken = sum((line["error_share"] or 0.0) * line["episodes"] for line in lines)
        return broken / episodes if episodes else 0.0


def _ends_text(kind: Kind, ends: Outcomes) -> str:
    reasons = ", ".join(
        f"{reason.value} {count}" for reason, count in sorted(ends.dropped.items()) if count
    )
    settled = f"{ends.evaluated} evaluated" if kind is Kind.EVAL else f"{ends.trained} trained"
    dropped = f"{sum(ends.dropped.values())} dropped{f' ({reasons})' if reasons else ''}"
    return f"{settled} + {dropped} + {ends.void} void"


def _checkpoint_in_writing(root: Path, now: float) -> str | None:
    """Say which checkpoint of a folder is being written, with its size and that of the newest complete one."""
    for incoming in root.glob(".incoming-step-*"):
        sizes = list(_sizes(incoming))
        if sizes and now - max(changed for _, changed in sizes) < FRESH_S:
            complete = sorted(root.glob("step-*"))
            size = sum(size for size, _ in sizes) / 1e6
            # Every checkpoint of a run holds the same tensors: the size of the last one predicts that of the next.
            total = "MB so far"
            if complete:
                total = f"of about {sum(size for size, _ in _sizes(complete[-1])) / 1e6:.0f} MB"
            step = int(incoming.name.rpartition("-")[2])
            return f"the checkpoint of step {step} is being written: {size:.0f} {total}"
    return None


def _sizes(directory: Path) -> Iterator[tuple[int, float]]:
    """Yield size and time of change of a directory's files; files that vanish meanwhile are skipped."""
    for path in directory.rglob("*"):
        try:
            status = path.stat()
        except FileNotFoundError:
            continue
        if path.is_file():
            yield status.st_size, status.st_mtime
