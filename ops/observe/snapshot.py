"""What a person wants to know about a run at a glance: is it learning, is it moving, what waits for what, what broke.

A Snapshot is the state of files and broker at one moment, and everything shown is a pure function of it. Either half
may be missing: a stopped run has no broker, and a run on another machine has no files here.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from horizonrl.common.config.schema import RunConfig
from horizonrl.common.state import Outcomes
from horizonrl.common.types import Kind, Phase
from horizonrl.learner.controller.curriculum import REPEATED_LABEL
from horizonrl.ops.observe.broker_status import BrokerStatus, counted, longer, waits
from horizonrl.ops.observe.troubles import Trouble
from horizonrl.ops.rundir import selection
from horizonrl.ops.rundir.summary import Files, ticket_accounts
from horizonrl.ops.terminal.figures import (
    RECENT,
    Line,
    duration,
    interval,
    mean_success,
    number,
    percent,
    seconds_left,
    sparkline,
    time_left,
)

TREND = 24
"""Width of a trend, in characters."""
SILENT_S = 600.0
"""Seconds without a report after which a learner is called silent: it may be in a long step, or gone."""
FRESH_S = 60.0
"""Seconds without growth after which a checkpoint counts as abandoned: its writer has died."""

Rows = list[tuple[str, str]]
"""Subject and text of each line."""


@dataclass(frozen=True)
class Snapshot:
    name: str
    config: RunConfig | None = None
    """None if only the broker is known and no recipe was given."""
    run_dir: Path | None = None
    files: Files = field(default_factory=lambda: Files((), (), (), ()))
    broker: BrokerStatus | None = None
    """None if no broker answers."""
    troubles: Sequence[Trouble] = ()
    now: float = field(default_factory=time.time)

    @property
    def step(self) -> int:
        # Either half may be missing or behind: files of another machine, or a broker that has ended.
        reported = self.broker.progress.step if self.broker and self.broker.progress else 0
        return max(reported, self.files.metrics[-1]["step"] if self.files.metrics else 0)

    @property
    def steps(self) -> int | None:
        return self.config.total_steps if self.config else None

    @property
    def share(self) -> float | None:
        return min(1.0, self.step / self.steps) if self.steps else None

    @property
    def state(self) -> str:
        """finished, running, silent for 3 h, stopped, or no learner yet."""
        progress = self.broker.progress if self.broker else None
        if progress is not None and not progress.finished:
            return f"silent for {duration(self.silent_s)}" if self.silent_s > SILENT_S else "running"
        if progress is not None and longer(progress, self.config):
            return "no learner yet"
        if progress is not None or self._complete():
            return "finished"
        return "stopped" if self.broker is None else "no learner yet"

    @property
    def silent_s(self) -> float:
        """Seconds since the learner's last report."""
        return self.broker.silent_s if self.broker else 0.0

    def _complete(self) -> bool:
        evaluated = self.config is None or len(self.files.evals) >= self.config.eval_rounds
        return bool(self.files.metrics) and self.step >= (self.steps or 0) and evaluated

    def headline(self) -> str:
        """Return run, step and time left in one line."""
        total = "" if self.steps is None else f" of {self.steps}"
        left = time_left(self.config, self.files.metrics, self.step) if self.config else ""
        shown = f"{self.name}: {self.state}, step {self.step}{total}{self._phase()}"
        return shown + (f", {left}" if left and self.state == "running" else "")

    def _phase(self) -> str:
        progress = self.broker.progress if self.broker else None
        if progress is not None:
            return f" ({progress.phase.value} {progress.phase_step})"
        return f" ({self.files.metrics[-1]['phase']})" if self.files.metrics else ""

    def learning(self) -> Rows:
        """Return what the last steps and evaluations came to."""
        if not self.files.metrics:
            elsewhere = "only the learner's machine knows: run `horizonrl status RUN_DIR` there"
            return [("success", "no step yet" if self.run_dir else elsewhere), *self._horizons()]
        rows = self._rl(self.files.rl) if self.files.rl else self._imitation(self.files.metrics)
        return rows + self._evaluations(self.files.evals) + self._horizons() + self._draws()

    def _rl(self, lines: Sequence[Line]) -> Rows:
        last, early, late = lines[-1], lines[:RECENT], lines[-RECENT:]
        success = [line["success_rate"] for line in lines]
        # Success is drawn from 0 to 1. A reward has no known range and takes that of its own values.
        text = f"{percent(last['success_rate']):>5}  {sparkline(success, TREND, 0.0, 1.0)}"
        if len(lines) > RECENT:
            text += f"  {percent(mean_success(late))} in {RECENT} steps, {percent(mean_success(early))} at first"
        rewards = [line["reward_mean"] for line in lines]
        return [("success", text), ("reward", f"{number(last['reward_mean']):>5}  {sparkline(rewards, TREND)}")]

    def _imitation(self, lines: Sequence[Line]) -> Rows:
        losses = [line["loss"] for line in lines]
        return [("loss", f"{number(losses[-1], 3)}  {sparkline(losses, TREND)}  of the demonstrations")]

    def _evaluations(self, lines: Sequence[Line]) -> Rows:
        if not lines:
            return []
        first, last = lines[0], lines[-1]
        trend = sparkline([line["success_rate"] for line in lines], TREND, 0.0, 1.0)
        text = f"{interval(last)} at version {last['version']}, {last['episodes']} held-out episodes"
        if len(lines) > 1:
            text += f"\n{trend}  version {first['version']}: {interval(first)}"
        return [("eval", text)]

    def _horizons(self) -> Rows:
        turns = self.broker.horizons if self.broker else {}
        turns = turns or (self.files.metrics[-1]["horizons"] if self.files.metrics else {})
        text = ", ".join(f"{env} {count} turns" for env, count in turns.items())
        if self.files.metrics:
            last = self.files.metrics[-1]
            text += f"; {number(last['turns_mean'], 1)} taken, {percent(last['truncated_share'])} truncated"
        rows = [("horizon", text)] if text else []
        for growth in self.broker.progress.growths if self.broker and self.broker.progress else ():
            why = f"{growth.from_turns} to {growth.to_turns} turns after {growth.phase_step} RL steps: {growth.reason}"
            rows.append(("", f"{growth.env_id} grew from {why}"))
        return rows

    def _draws(self) -> Rows:
        """Return what an adaptive curriculum draws next and why; nothing if it is uniform."""
        drawn = self.files.metrics[-1].get("curriculum", ()) if self.files.metrics else ()
        return [("" if place else "draws", _draw(one)) for place, one in enumerate(drawn[:MOST_DRAWS])]

    def moving(self) -> Rows:
        """Return how fast the run is, how old its data is, and what became of its tickets."""
        rows: Rows = []
        if self.files.metrics:
            last = self.files.metrics[-1]
            ended = duration(self.now - last["time"])
            timed = f"{number(last['step_s'], 1)} s and {number(last['wait_s'], 1)} s of waiting"
            rows += [("pace", f"step {last['step']} ended {ended} ago; it took {timed}")]
            generated, trained = (number(last[f"{what}_tokens_per_s"], 0) for what in ("generated", "train"))
            rows += [("tokens/s", f"{generated} generated, {trained} trained")]
            if last["phase"] == Phase.RL.value:
                bound = f" (at most {self.config.rl.max_staleness})" if self.config else ""
                stale = f"mean {number(last['staleness_mean'], 1)}, max {last['staleness_max']}{bound}"
                rows += [("stale by", f"{stale} versions; effective sample size {percent(last['ess'])}")]
        return rows + self._versions() + self._tickets()

    def _versions(self) -> Rows:
        broker = self.broker
        if broker is None or broker.progress is None:
            return []
        progress, weights = broker.progress, ""
        if broker.weights is not None:
            weights = f"; weights of version {broker.weights.policy.version} are out, "
            weights += f"{broker.weights.weights_bytes / 1e6:.0f} MB"
        spoken = duration(self.silent_s)
        again = f", lineage {progress.policy.lineage}" if progress.policy.lineage else ""
        return [("learner", f"version {progress.policy.version}{again}, last heard {spoken} ago{weights}")]

    def _tickets(self) -> Rows:
        return [(f"{kind} tickets", text) for kind, text in self._accounts()]

    def _accounts(self) -> Iterator[tuple[str, str]]:
        """Yield each kind of tickets with its ends: from the broker if it answers, else from the ledger."""
        if self.broker is not None:
            for kind, ends in self.broker.outcomes.items():
                if issued := self.broker.issued[kind]:
                    yield kind.value, f"{issued} issued = {_ends(kind, ends)} + {issued - ends.settled} outstanding"
            return
        for name, ends in ticket_accounts(self.files)["kinds"].items():
            if ends:
                dropped = {reason: count for reason, count in ends.items() if reason not in KEPT}
                kept = Outcomes(**{end: ends[end] for end in KEPT}, dropped=dropped)
                yield name, _ends(Kind(name), kept)

    def waiting(self) -> list[str]:
        """Say who waits for what, and which checkpoint is being written."""
        if self.broker is None:
            return []
        lines = waits(self.broker, self.config, self.files.metrics if self.run_dir else None)
        return [*lines, *([saving] if (saving := self.checkpoint()) else [])]

    def checkpoint(self) -> str | None:
        """Say which checkpoint is being written, and how far it is compared with the one before."""
        return None if self.run_dir is None else checkpoint_in_writing(self.run_dir / "checkpoints", self.now)

    def broken(self) -> list[str]:
        """Say what broke, the latest first, and where to read about it."""
        lines = [
            f"{trouble.when(self.now)}{f': {trouble.detail}' if trouble.detail else ''}" for trouble in self.troubles
        ]
        if (share := self.error_share()) > 0:
            lines.append(f"{percent(share)} of the last steps' episodes broke: environment or engine errors")
        if (unequal := selection.warning(self.files.metrics)) is not None:
            lines.append(unequal)
        if self.broker is not None and self.broker.dead:
            lines.append(f"{counted(self.broker.dead, 'message')} could not be decoded (stream {self.name}_DEAD)")
        if self.broker is not None and self.broker.log.full and self.state != "finished":
            log = self.broker.log
            lines.append(f"the group log is full: {log.stored_bytes:,} of broker.max_log_bytes = {log.limit_bytes:,}")
        if resumes := sum(line["lineage"] > 0 for line in self.files.lineages):
            lines.append(f"the learner has resumed {counted(resumes, 'time')}")
        return lines

    def error_share(self) -> float:
        lines = self.files.metrics[-RECENT:]
        episodes = sum(line["episodes"] for line in lines)
        return sum((line["error_share"] or 0.0) * line["episodes"] for line in lines) / episodes if episodes else 0.0

    def as_json(self) -> dict[str, Any]:
        """Return the snapshot for programs: numbers, and the sentences on waits and troubles."""
        last = self.files.metrics[-1] if self.files.metrics else None
        rl = self.files.rl
        broker = self.broker
        return {
            "run": self.name,
            "state": self.state,
            "step": self.step,
            "steps": self.steps,
            "phase": broker.progress.phase.value if broker and broker.progress else last["phase"] if last else None,
            "seconds_left": seconds_left(self.config, self.files.metrics, self.step) if self.config else None,
            "success_recent": mean_success(rl[-RECENT:]),
            "success_first": mean_success(rl[:RECENT]),
            "last_step": last,
            "last_eval": {key: self.files.evals[-1][key] for key in EVAL_KEYS} if self.files.evals else None,
            "broker": _broker_json(broker) if broker else None,
            "waits": self.waiting(),
            "broke": self.broken(),
            "troubles": [
                {
                    "part": trouble.part,
                    "event": trouble.event,
                    "count": trouble.count,
                    "last": trouble.last,
                    "log": str(trouble.log_file),
                }
                for trouble in self.troubles
            ],
            "time": self.now,
        }


MOST_DRAWS = 4
"""Most categories that one screen names; the report has more."""


def _draw(one: Line) -> str:
    again = one["category"] == REPEATED_LABEL
    name = f"{counted(one['tasks'], 'task')} that differed" if again else one["category"]
    told = "none seen yet" if one["differed"] is None else f"{percent(one['differed'])} of groups differ"
    return f"{percent(one['share']):>5}  {one['env_id']}, {name} ({told})"


KEPT = ("trained", "evaluated", "void")
EVAL_KEYS = ("version", "success_rate", "low", "high", "episodes")


def _ends(kind: Kind, ends: Outcomes) -> str:
    reasons = ", ".join(f"{reason.value} {count}" for reason, count in ends.dropped.items() if count)
    settled = f"{ends.evaluated} evaluated" if kind is Kind.EVAL else f"{ends.trained} trained"
    dropped = f"{sum(ends.dropped.values())} dropped{f' ({reasons})' if reasons else ''}"
    return f"{settled} + {dropped} + {ends.void} void"


def _broker_json(broker: BrokerStatus) -> dict[str, Any]:
    progress = broker.progress
    return {
        "version": progress.policy.version if progress else None,
        "lineage": progress.policy.lineage if progress else None,
        "learner_heard_at": broker.spoken_at,
        "weights_version": broker.weights.policy.version if broker.weights else None,
        "horizons": broker.horizons,
        "tickets": {
            kind.value: {"issued": issued, "outstanding": broker.outstanding(kind)}
            | broker.outcomes.get(kind, Outcomes()).model_dump(mode="json")
            for kind, issued in broker.issued.items()
        },
        "tickets_queued": broker.queue.waiting,
        "tickets_leased": broker.queue.leased,
        "actors_idle": broker.queue.idle,
        "groups_last_sequence": broker.log.last_sequence,
        "groups_unread": broker.unread,
        "groups_bytes": broker.log.stored_bytes,
        "batch": broker.batch,
        "dead_letters": broker.dead,
    }


def checkpoint_in_writing(root: Path, now: float) -> str | None:
    """Say which checkpoint of a folder is being written, with its size and that of the newest complete one."""
    for incoming in root.glob(".incoming-step-*"):
        sizes = list(_sizes(incoming))
        if sizes and now - max(changed for _, changed in sizes) < FRESH_S:
            complete = sorted(path for path in root.glob("step-*"))
            size = sum(size for size, _ in sizes) / 1e6
            # Every checkpoint of a run holds the same tensors, so the size of the last one predicts that of the next.
            before = sum(size for size, _ in _sizes(complete[-1])) / 1e6 if complete else None
            total = f"of about {before:.0f} MB" if before is not None else "MB so far"
            step = int(incoming.name.rpartition("-")[2])
            return f"the checkpoint of step {step} is being written: {size:.0f} {total}"
    return None


def _sizes(directory: Path) -> Iterator[tuple[int, float]]:
    """Yield size and time of change of a directory's files; files that vanish meanwhile are skipped."""
    for path in directory.rglob("*"):
        try:
            found = path.stat()
        except FileNotFoundError:
            continue
        if path.is_file():
            yield found.st_size, found.st_mtime
