"""The console of `horizonrl train`: a live table on a terminal, a line a step elsewhere."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import rich.box
import rich.console
from rich.live import Live
from rich.table import Table

from horizonrl.common.config import RunConfig
from horizonrl.common.types import Progress
from horizonrl.ops.rundir import EVALS, METRICS, read_lines

REFRESH_S = 1.0
QUIET_S = 60.0
"""A console that is no terminal says what is waited for once a step has taken this long."""
ROWS = 12

COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "step": lambda line: str(line["step"]),
    "phase": lambda line: line["phase"],
    "horizon": lambda line: str(line["horizon"]),
    "success": lambda line: percent(line["success_rate"]),
    "reward": lambda line: number(line["reward_mean"]),
    "turns": lambda line: number(line["turns_mean"]),
    "cut": lambda line: percent(line["truncated_share"]),
    "stale": lambda line: "-" if line["staleness_max"] is None else f"≤{line['staleness_max']}",
    "groups": lambda line: f"{line['groups_trained']}+{line['groups_dropped']}",
    "loss": lambda line: number(line["loss"], 3),
    "gap": lambda line: number(line["logprob_gap"], 3),
    "tok/s": lambda line: number(line["generated_tokens_per_s"], 0),
    "step s": lambda line: number(line["step_s"], 1),
    "wait s": lambda line: number(line["wait_s"], 1),
}

WIDTHS = {"step": 5, "phase": 9, "turns": 6, "cut": 5, "stale": 6}
"""Columns of the plain output that are not 7 wide."""


class Console:
    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._metrics = config.run_dir / METRICS
        self._evals = config.run_dir / EVALS
        self._told: set[tuple[int, int]] = set()
        """Version and lineage of the evaluations that were shown."""
        self._console = rich.console.Console()
        self._started = time.monotonic()
        self.progress: Progress | None = None
        """The learner's latest word, set by whoever watches the broker."""

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Show that something takes a while, and how long it took."""
        started = time.monotonic()
        with self._console.status(f"{what} ..."):
            if not self._console.is_terminal:
                self.say(f"{what} ...")
            yield
        if self._console.is_terminal:
            self.say(f"{what}: {time.monotonic() - started:.0f} s")

    async def follow(self, restarts: Callable[[], dict[str, int]]) -> None:
        """Draw the run's table until cancelled. Takes the journal's lines; woken once a second."""
        self.say(f"run {self._config.run.name}: {self._config.total_steps} steps; logs in {self._config.run_dir}/logs")
        if not self._console.is_terminal:
            await self._follow_plainly()
        with Live(console=self._console, refresh_per_second=2) as live:
            while True:
                lines = await asyncio.to_thread(read_lines, self._metrics)
                await self._tell_evaluations()
                live.update(self._table(lines, restarts()))
                await asyncio.sleep(REFRESH_S)

    async def _follow_plainly(self) -> None:
        shown, spoken = 0, time.monotonic()
        while True:
            lines = await asyncio.to_thread(read_lines, self._metrics)
            if lines and not shown:
                self.say("  ".join(f"{name:>{WIDTHS.get(name, 7)}}" for name in COLUMNS))
            for line in lines[shown:]:
                self.say("  ".join(f"{cell(line):>{WIDTHS.get(name, 7)}}" for name, cell in COLUMNS.items()))
            await self._tell_evaluations()
            if len(lines) > shown:
                shown, spoken = len(lines), time.monotonic()
            elif time.monotonic() - spoken > QUIET_S:
                self.say(f"  waiting: {waiting_for(self.progress)}")
                spoken = time.monotonic()
            await asyncio.sleep(REFRESH_S)

    async def _tell_evaluations(self) -> None:
        """Say what has been evaluated since; a resumed learner may write a line again that was shown before."""
        for line in await asyncio.to_thread(read_lines, self._evals):
            if (judged := (line["version"], line["lineage"])) not in self._told:
                self.say(f"  version {line['version']}: eval {interval(line)} of {line['episodes']} held-out episodes")
                self._told.add(judged)

    def _table(self, lines: list[dict[str, Any]], restarts: dict[str, int]) -> Table:
        done = lines[-1]["step"] if lines else 0
        table = Table(
            box=rich.box.SIMPLE_HEAD,
            padding=0,
            pad_edge=False,
            title=self._title(done, lines, restarts),
            title_justify="left",
            caption=f"{caption(lines)}; {waiting_for(self.progress)}",
        )
        for name in COLUMNS:
            table.add_column(name, justify="right", no_wrap=True)
        for line in lines[-ROWS:]:
            table.add_row(*(cell(line) for cell in COLUMNS.values()))
        return table

    def _title(self, done: int, lines: list[dict[str, Any]], restarts: dict[str, int]) -> str:
        elapsed = time.monotonic() - self._started
        title = f"{self._config.run.name}: step {done} of {self._config.total_steps}, {elapsed / 60:.1f} min"
        if len(lines) > 1:
            recent = lines[-5:]
            per_step = (recent[-1]["time"] - recent[0]["time"]) / max(len(recent) - 1, 1)
            title += f", about {per_step * (self._config.total_steps - done) / 60:.0f} min left"
        elif not lines:
            title += ", starting the engines"
        again = ", ".join(f"{name} {count}x" for name, count in restarts.items() if count)
        return title + (f"; restarted: {again}" if again else "")

    def summary(self, model_dir: Path) -> None:
        """Say how the run ended: success in the first and the last five RL steps, and where the model is."""
        lines = [line for line in read_lines(self._metrics) if line["phase"] == "rl"]
        self.say(f"finished in {(time.monotonic() - self._started) / 60:.1f} min")
        if lines:
            first, last = lines[:5], lines[-5:]
            self.say(f"success over the first {len(first)} RL steps: {percent(mean_success(first))}")
            self.say(f"success over the last {len(last)} RL steps:  {percent(mean_success(last))}")
        if evals := read_lines(self._evals):
            told = ", ".join(f"version {line['version']} {interval(line)}" for line in (evals[0], evals[-1]))
            self.say(f"eval: {told}; `horizonrl export --best` takes the best version of all {len(evals)}")
        self.say(f"model: {model_dir}")


def caption(lines: list[dict[str, Any]]) -> str:
    if not lines:
        return "waiting for the first step"
    line = lines[-1]
    settled = line["tickets_issued"] - line["tickets_outstanding"]
    return f"tickets: {line['tickets_issued']} issued = {settled} settled + {line['tickets_outstanding']} outstanding"


def waiting_for(progress: Progress | None) -> str:
    """Say what the run has settled so far, so that a long wait explains itself."""
    if progress is None:
        return "the engines start"
    trained = sum(ends.trained for ends in progress.outcomes.values())
    dropped = sum((Counter(ends.dropped) for ends in progress.outcomes.values()), Counter())
    reasons = ", ".join(f"{reason.value} {count}" for reason, count in sorted(dropped.items()))
    void = sum(ends.void for ends in progress.outcomes.values())
    evaluated = sum(ends.evaluated for ends in progress.outcomes.values())
    said = f"{trained} groups trained, {dropped.total()} dropped{f' ({reasons})' if reasons else ''}, {void} void"
    return said + (f", {evaluated} evaluated" if evaluated else "")


def mean_success(lines: list[dict[str, Any]]) -> float | None:
    """Return the success of several steps, each weighted by its episodes."""
    known = [line for line in lines if line["success_rate"] is not None]
    episodes = sum(line["episodes"] for line in known)
    return sum(line["success_rate"] * line["episodes"] for line in known) / episodes if episodes else None


def interval(line: dict[str, Any]) -> str:
    """Return an evaluation's success and its interval of 95 %."""
    return f"{percent(line['success_rate'])} ({100 * line['low']:.0f}-{100 * line['high']:.0f} %)"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
