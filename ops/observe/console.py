"""The console of `horizonrl train`: one line per step and, on a terminal, a few lines below it that are redrawn.

These say how far the run is, what waits for what and what broke. If the output is not a terminal (a pipe, CI), steps
have all columns, and a long wait is explained once per minute.
"""

import asyncio
import re
import shlex
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from horizonrl.common.config.schema import RunConfig
from horizonrl.common.logs import get_logger
from horizonrl.common.quantities import QUANTITIES
from horizonrl.common.run_dir import LOGS
from horizonrl.ops.models.models import Tell
from horizonrl.ops.rundir.broker_status import BrokerStatus
from horizonrl.ops.rundir.files import Files, JournalReader, Line, TrainingMeans
from horizonrl.ops.rundir.troubles import Trouble, TroubleReader, collect, event_time
from horizonrl.ops.rundir.view import RunView
from horizonrl.ops.terminal.console import plain_console
from horizonrl.ops.terminal.figures import clock, duration, interval, mean_return, number, percent
from horizonrl.ops.terminal.waiting import waiting

log = get_logger()

REFRESH_S = 1.0
QUIET_S = 60.0
"""Seconds without a step after which a console that is not a terminal says what the run waits for."""
HEADER_EVERY = 20
"""Steps after which a terminal repeats the header, which has scrolled out of view."""
MOST_TROUBLES = 3
READY = "service_opened"
"""The event that a part logs once it is up."""
MEASURED = "part_ready"
"""The event that the console then logs, with the time it took."""

Column = tuple[str, Callable[[Line], str]]


def _column(name: str, show: Callable[[Any], str]) -> Column:
    """Return the column of a quantity, under the name that the table of quantities gives it."""
    return QUANTITIES[name].column, lambda line: show(line[name])


COLUMNS = dict[str, Callable[[Line], str]](
    [
        ("step", lambda line: str(line["step"])),
        ("phase", lambda line: line["phase"]),
        _column("horizon", str),
        _column("success_rate", percent),
        _column("reward_mean", number),
        _column("turns_mean", number),
        _column("truncated_share", percent),
        _column("staleness_max", lambda versions: "-" if versions is None else f"≤{versions}"),
        ("groups", lambda line: f"{line['groups_trained']}+{line['groups_dropped']}"),
        _column("loss", lambda loss: number(loss, 3)),
        _column("logprob_gap", lambda gap: number(gap, 3)),
        _column("generated_tokens_per_s", lambda tokens: number(tokens, 0)),
        _column("step_s", lambda seconds: number(seconds, 1)),
        _column("wait_s", lambda seconds: number(seconds, 1)),
    ]
)
"""What a step's line shows, by header."""
WIDTHS = {
    "step": 5,
    "phase": 9,
    "reward": 6,
    "turns": 6,
    "truncated": 9,
    "stale": 6,
    "loss": 6,
    "gap": 6,
    "step s": 6,
    "wait s": 6,
}
"""Columns that are not 7 wide."""
DISPENSABLE = ("gap", "loss", "phase", "turns", "reward", "stale", "truncated", "tok/s")
"""Columns that a narrow terminal leaves out, the first of these first."""


class Console:
    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._journal = JournalReader(config.run_dir, ("metrics", "evals"))
        self._files = Files()
        """The journal as it was last read."""
        logs = config.run_dir / LOGS
        self._usual_s = start_times(TroubleReader(logs))
        """Seconds each part took to start the last time."""
        # A second reader, from the end: what earlier sessions logged is no trouble of this one.
        self._logs = TroubleReader.at_end(logs)
        self._shown_evals: set[tuple[int, int]] = set()
        """Version and lineage of the evaluations that were shown."""
        self._console = plain_console()
        self._started = time.monotonic()
        self._ready: dict[str, float] = {}
        """When each part was last up, in seconds since the epoch."""
        self._troubles: list[Trouble] = []
        self._warned: set[tuple[str, str]] = set()
        self._columns = fitting(self._console.width) if self.is_terminal else tuple(COLUMNS)
        self._since_header: int | None = None
        """Steps shown since the header; None before the first."""
        self.broker: BrokerStatus | None = None
        """The broker's latest account, set by the task that observes it."""

    @property
    def is_terminal(self) -> bool:
        return self._console.is_terminal

    def say(self, text: str, style: str = "") -> None:
        self._console.print(text, style=style, highlight=False, soft_wrap=True)

    def waiting(self, what: str) -> AbstractContextManager[Tell]:
        """Show that something takes a while, and how long it took."""
        return waiting(self._console, what, announced=True)

    async def follow(self, started: Callable[[], Mapping[str, float]]) -> None:
        """Show the run until cancelled, once per second, from the journal, the logs and the broker's account.

        `started` returns when each part was last started, in seconds since the epoch.
        """
        self.say(
            f"run {self._config.run.name}: {self._config.total_steps} steps; logs in {self._config.run_dir}/logs"
        )
        shown = self.skip_earlier()
        if not self.is_terminal:
            # Never returns, so only a terminal gets to the live display below.
            await self._follow_plainly(started, shown)
        with Live(
            get_renderable=lambda: self.live(started()), console=self._console, transient=True
        ):
            while True:
                shown = await self._tell_steps(shown)
                await self._read(started())
                await asyncio.sleep(REFRESH_S)

    def skip_earlier(self) -> int:
        """Say in one line where an earlier `train` stopped; return the number of steps it has shown."""
        files = self._files = self._journal.read()
        self._shown_evals = {(line["version"], line["lineage"]) for line in files.evals}
        if files.metrics:
            earlier = f"`horizonrl status {shlex.quote(str(self._config.run_dir))}` shows the earlier ones"
            self.say(f"  resumes after step {files.step}; {earlier}")
        return len(files.metrics)

    async def _follow_plainly(self, started: Callable[[], Mapping[str, float]], shown: int) -> None:
        said_at = time.monotonic()
        while True:
            before, shown = shown, await self._tell_steps(shown)
            await self._read(started())
            self._warn()
            if shown > before:
                said_at = time.monotonic()
            elif time.monotonic() - said_at > QUIET_S:
                self.say(f"  waiting: {self.wait_text()}")
                said_at = time.monotonic()
            await asyncio.sleep(REFRESH_S)

    async def _tell_steps(self, shown: int) -> int:
        """Print the steps beyond the first `shown`, and the evaluations; return how many steps there are.

        Steps and evaluations that a resumed learner writes again are not printed again.
        """
        # In a thread: this loop also supervises the parts, and a resumed run's journal may be long.
        files = self._files = await asyncio.to_thread(self._journal.read)
        for line in files.metrics[shown:]:
            if self._since_header is None or (
                self.is_terminal and self._since_header == HEADER_EVERY
            ):
                self.say(row({name: name for name in self._columns}), "bold")
                self._since_header = 0
            self.say(row({name: COLUMNS[name](line) for name in self._columns}))
            self._since_header += 1
        for line in files.evals:
            key = line["version"], line["lineage"]
            if key not in self._shown_evals:
                earned = f", {mean_return(line)}" if mean_return(line) else ""
                self.say(
                    f"  version {line['version']}: eval {interval(line)} of {line['episodes']} held-out episodes"
                    f"{earned}"
                )
                self._shown_evals.add(key)
        return max(shown, len(files.metrics))

    async def _read(self, started: Mapping[str, float]) -> None:
        """Read what the parts have logged since the last look: that they are up, and what broke."""
        events = await asyncio.to_thread(lambda: list(self._logs.events()))
        for path, event in events:
            if event["event"] == READY and path.stem in started:
                self._ready[path.stem] = event_time(event)
                after_s = round(self._ready[path.stem] - started[path.stem], 1)
                log.info(MEASURED, part=path.stem, after_s=after_s)
        self._troubles = collect(events, self._troubles)

    def _warn(self) -> None:
        """Print each kind of trouble of a part when it first occurs."""
        for trouble in self._troubles:
            if (trouble.part, trouble.event) not in self._warned:
                self._warned.add((trouble.part, trouble.event))
                self.say(
                    f"  {trouble} ({trouble.log_file}){f': {trouble.detail}' if trouble.detail else ''}"
                )

    def view(self) -> RunView:
        """Return the run as files, logs and broker last were."""
        config = self._config
        return RunView(
            config.run.name, config, config.run_dir, self._files, self.broker, self._troubles
        )

    def wait_text(self) -> str:
        """Say who waits for what and how the tickets ended so far, to explain a long wait."""
        view = self.view()
        accounts = [f"{kind.value} tickets: {text}" for kind, text in view.accounts()]
        return "; ".join([*(view.waits() or ["the engines are starting"]), *accounts])

    def live(self, started: Mapping[str, float]) -> RenderableType:
        """Return the lines that are redrawn: how far the run is, what waits for what, what broke."""
        view = self.view()
        coming = self._coming(started, view.now)
        waits = view.waits() if view.progress is not None or not coming else []
        if waits and view.files.metrics:
            waits[0] += f" (last step: {duration(view.now - view.files.metrics[-1]['time'])} ago)"
        return Group(
            self._bar(view),
            *(_line(text) for text in (coming, *waits, view.checkpoint()) if text),
            *(_line(trouble.when(view.now), "yellow") for trouble in view.troubles[:MOST_TROUBLES]),
        )

    def _bar(self, view: RunView) -> RenderableType:
        step, total = view.files.step, self._config.total_steps
        # After the last step no other one comes, whose phase could be shown.
        phase, _ = self._config.phase(min(step, total - 1))
        bar = Table.grid(padding=(0, 1, 0, 0))
        took = clock(time.monotonic() - self._started) + (
            f", {view.time_left}" if view.time_left else ""
        )
        bar.add_row(
            f"step {step} of {total}",
            ProgressBar(total=total, completed=step, width=24),
            phase.value,
            took,
        )
        return bar

    def _coming(self, started: Mapping[str, float], now: float) -> str:
        """Say which parts are not up yet, for how long, and how long they took the last time."""
        parts = []
        for name, since in started.items():
            if self._ready.get(name, 0.0) < since:
                usual = (
                    f" of about {duration(self._usual_s[name])}" if name in self._usual_s else ""
                )
                parts.append(f"{name} for {duration(now - since)}{usual}")
        return f"starting: {', '.join(parts)}" if parts else ""

    def summary(self, model_dir: Path, report: Path, command: str) -> None:
        """Say how the run ended: what imitation and RL added, the model, the report, and what to do next.

        `command` is the one that started the run.
        """
        self._files = self._journal.read()
        view, success = self.view(), self._files.success
        self.say(f"finished in {(time.monotonic() - self._started) / 60:.1f} min")
        if success.steps:
            self._say_means("success", success, percent)
            # Returns that are only 0 or 1 say the same.
            if self._files.reward != success:
                self._say_means("reward", self._files.reward, number)
        if evals := view.files.evals:
            last = evals[-1]
            if view.gain:
                self.say(f"success on held-out tasks: {view.gain}")
            self.say(
                f"eval: version {last['version']} {interval(last)}; `horizonrl export --best` exports the best of all "
                f"{len(evals)} versions evaluated"
            )
        self.say(f"model:  {model_dir}")
        self.say(f"report: {report}")
        self.say("What next:")
        for next_command, purpose in next_commands(
            self._config, command, max(view.step, view.steps or 0)
        ).items():
            self.say(f"  {next_command}\n      {purpose}")

    def _say_means(
        self, what: str, means: TrainingMeans, show: Callable[[float | None], str]
    ) -> None:
        text = f"{what} in training: {show(means.last)} over the last {means.steps} RL steps"
        if len(self._files.rl) > means.steps:
            text += f", {show(means.first)} over the first {means.steps}"
        self.say(text)


def next_commands(config: RunConfig, command: str, taken: int) -> dict[str, str]:
    """Return three commands to run after a run has finished, each with what it does.

    `taken` is the number of steps, which is above the config's if a run was started again with fewer.
    """
    run_dir = shlex.quote(str(config.run_dir))
    evaluation = shlex.quote(str(config.run_dir / "evaluation"))
    key, steps = (
        ("--rl.steps", taken - config.imitation.steps)
        if config.rl.steps
        else ("--imitation.steps", taken)
    )
    start = re.sub(rf" {key}[ =]\S+", "", command)  # the command may have set the key before
    return {
        f"horizonrl eval {run_dir} --out {evaluation}": "measures success on held-out tasks, with intervals",
        f"horizonrl history lineage {run_dir} --version {taken}": "shows which groups made the last version",
        f"{start} {key} {2 * steps}": "trains on from here",
    }


def row(cells: Mapping[str, str]) -> str:
    return "  ".join(f"{cell:>{WIDTHS.get(name, 7)}}" for name, cell in cells.items())


def fitting(width: int) -> tuple[str, ...]:
    """Return the columns that fit a terminal's width; those of DISPENSABLE go first, in that order."""
    columns, without = tuple(COLUMNS), list(DISPENSABLE)
    while len(row(dict.fromkeys(columns, ""))) > width and without:
        gone = without.pop(0)
        columns = tuple(name for name in columns if name != gone)
    return columns


def start_times(logs: TroubleReader) -> dict[str, float]:
    return {
        event["part"]: event["after_s"] for _, event in logs.events() if event["event"] == MEASURED
    }


def _line(text: str, style: str = "") -> Text:
    return Text(f"  {text}", style=style, no_wrap=True, overflow="ellipsis")
