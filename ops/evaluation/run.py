"""`horizonrl eval`: plan, play what the file does not hold yet, report."""

import asyncio
import json
import multiprocessing
import os
import shlex
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import IO, Any

import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from horizonrl.actors.rollout.rollout import play
from horizonrl.common.errors import HorizonError, RunFailed, raise_first
from horizonrl.common.logs import configure_logs
from horizonrl.common.run_dir import TESTS
from horizonrl.common.state import ContextRule
from horizonrl.envs import registry
from horizonrl.ops.evaluation.journal import EvaluationJournal, Key, Line
from horizonrl.ops.evaluation.plan import Choice, Plan, Play, make_plan
from horizonrl.ops.evaluation.report import blocks_of, rich_tables, write_report
from horizonrl.ops.evaluation.subjects import (
    MakeRollout,
    RunVersion,
    Subject,
    SubjectRequest,
    ticket_subject,
)
from horizonrl.ops.terminal.console import plain_console
from horizonrl.ops.terminal.waiting import waiting

BROKEN_LIMIT = 20
"""Episodes of an environment that break in a row, after which it is not the episodes that are broken."""
PLAIN_COLUMNS = 120
"""Width of a table that goes into a file."""
STOPPED = "stopped. The same command resumes"


def evaluate(request: SubjectRequest, choice: Choice, directory: Path) -> int:
    """Evaluate and print the table; return 0 when every episode was played, 130 when it was interrupted."""
    with ticket_subject(request) as subject:
        plan = make_plan(subject.config, choice, own_envs=subject.own_envs)
        settings = settings_of(subject, plan)
        directory.mkdir(parents=True, exist_ok=True)
        with (
            (directory / "eval.log").open("a", encoding="utf-8") as sink,
            _noise_into(sink) as terminal,
        ):
            configure_logs(run="eval", role="eval", stream=sink)
            return carry_out(subject, plan, settings, directory, terminal)


def carry_out(
    subject: Subject, plan: Plan, settings: Mapping[str, Any], directory: Path, terminal: Console
) -> int:
    """Play, report into the directory, and print the table; `terminal` shows how far it is."""
    try:
        with EvaluationJournal.open(directory, settings) as journal:
            played = uvloop.run(play_missing(plan, subject, journal, terminal))
            blocks = blocks_of(plan, journal.lines)
    except KeyboardInterrupt:
        terminal.print(STOPPED)
        return 130
    write_report(
        directory, {"model": subject.name, "split": plan.split, "settings": settings}, plan, blocks
    )
    # The same command again, after its end, plays nothing.
    if played and subject.version is not None and plan.split in ("test", "all"):
        record_test(subject.version, plan.split, blocks[-1])
    console = plain_console(width=None if sys.stdout.isatty() else PLAIN_COLUMNS)
    for table in rich_tables(plan, blocks):
        console.print(table)
    console.print(f"results.json, table.md and episodes.jsonl are in {directory}", highlight=False)
    _refuse_nothing(plan, journal.lines)
    return 0


def _refuse_nothing(plan: Plan, lines: Mapping[Key, Line]) -> None:
    """Raise RunFailed when every episode of an environment broke: then nothing was evaluated there."""
    for part in plan.parts:
        played = [lines[planned.key] for planned in plan.plays if planned.env.id == part.env.id]
        # A row of broken episodes has no success rate; exit code 0 would call that an evaluation.
        if all(line.stop.broken for line in played):
            raise RunFailed(
                f"all {len(played)} episodes of {part.env.id} broke, the last with: {played[-1].error}. Fix that, and "
                "repeat the command: it plays the broken ones again"
            )


def settings_of(subject: Subject, plan: Plan) -> dict[str, Any]:
    """Return what the episodes depend on. Raises if an environment cannot be made."""
    config = subject.config
    return {
        "model": subject.facts,
        "seed": config.run.seed,
        "temperature": config.eval.temperature,
        "max_turn_tokens": config.rollout.max_turn_tokens,
        "system_prompt": config.rollout.system_prompt,
        # Left out at its default: an evaluation from before this key existed can still be continued.
        **(
            {}
            if config.rollout.context is ContextRule.STOP
            else {"context": config.rollout.context.value}
        ),
        "announce": config.horizon.announce,
        "environments": {
            part.env.id: {
                "version": uvloop.run(registry.versioned_id(part.env.id, part.env.options)),
                "options": part.env.options,
                "turns": part.turns[-1],
            }
            for part in plan.parts
        },
    }


def record_test(version: RunVersion, split: str, block: Mapping[str, Any]) -> None:
    """Append to the run's directory which command played test tasks, and what it came to."""
    # An environment's last row is that of all its tasks.
    results = {
        row["env"]: {"tasks": row["tasks"], "success_rate": row["success_rate"]}
        for row in block["rows"]
    }
    line = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["horizonrl", *sys.argv[1:]]),
        "split": split,
        "version": version.version,
        "environments": results,
    }
    with (version.run_dir / TESTS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


async def play_missing(
    plan: Plan, subject: Subject, journal: EvaluationJournal, terminal: Console
) -> int:
    """Play what the file does not hold, and return how many episodes that was.

    As many are played at once as an actor has slots.
    """
    remaining = [
        missing
        for missing in plan.plays
        if missing.key not in journal.lines or not journal.lines[missing.key].settled
    ]
    if not remaining:
        return 0
    environments = {part.env.id: part.env.options for part in plan.parts}
    async with AsyncExitStack() as opened:
        with waiting(terminal, f"starting {subject.name}"), _ended_by_interrupt(terminal):
            make_rollout = await opened.enter_async_context(
                subject.start(subject.config, environments)
            )
        with _progress(terminal) as progress:
            bar = progress.add_task(
                "episodes", total=len(plan.plays), completed=len(plan.plays) - len(remaining)
            )
            player = Player(make_rollout, journal, lambda: progress.advance(bar))
            with raise_first(HorizonError, OSError):
                async with asyncio.TaskGroup() as group:
                    # One iterator for all players. Taking from it never awaits, so each episode is played once.
                    queue = iter(remaining)
                    for _ in range(min(subject.config.actor.slots, len(remaining))):
                        group.create_task(player.run(queue))
    return len(remaining)


@contextmanager
def _noise_into(sink: IO[str]) -> Iterator[Console]:
    """Send what libraries and the engine's process write to stderr to the log; yield the console that was there."""
    sys.stderr.flush()
    # The descriptor itself: the engine's process and C libraries inherit it, and know nothing of sys.stderr.
    with os.fdopen(os.dup(2), "w") as before:
        os.dup2(sink.fileno(), 2)
        try:
            yield plain_console(before)
        finally:
            sys.stderr.flush()
            os.dup2(before.fileno(), 2)


@contextmanager
def _ended_by_interrupt(terminal: Console) -> Iterator[None]:
    """Let Ctrl-C end the process at once: an engine that starts blocks the event loop, and there is nothing to keep."""

    def end(*_: object) -> None:
        # os._exit skips the hook with which multiprocessing ends its children.
        for child in multiprocessing.active_children():
            child.kill()
        terminal.show_cursor()
        # Not under the spinner, which would be drawn again.
        print(f"\n{STOPPED}", file=terminal.file, flush=True)
        os._exit(130)

    before = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@dataclass
class Player:
    """Plays episodes and writes them down."""

    make_rollout: MakeRollout
    journal: EvaluationJournal
    advance: Callable[[], None]
    broken_in_a_row: Counter[str] = field(default_factory=Counter)
    """Per environment."""

    async def run(self, queue: Iterator[Play]) -> None:
        """Play what the queue holds. Takes from it as the others do; ends with it, or with the first RunFailed."""
        for planned in queue:
            make = partial(registry.make, planned.env.id, planned.env.options)
            # Index 0: each ticket here is one episode, and its seed tells a task's samples apart.
            line = Line.of(
                planned, await play(make, self.make_rollout(planned.env), planned.ticket, 0)
            )
            self.journal.add(line)
            self.advance()
            self._give_up_if_nothing_works(line)

    def _give_up_if_nothing_works(self, line: Line) -> None:
        self.broken_in_a_row[line.env] = 0 if line.settled else self.broken_in_a_row[line.env] + 1
        if self.broken_in_a_row[line.env] >= BROKEN_LIMIT:
            raise RunFailed(
                f"{BROKEN_LIMIT} episodes of {line.env} broke in a row, the last with: {line.error}. Fix that, and "
                "repeat the command: it resumes, and plays the broken ones again"
            )


def _progress(terminal: Console) -> Progress:
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=terminal)
