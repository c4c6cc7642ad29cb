"""Long waits, made visible: a spinner or a bar on a terminal, plain lines elsewhere."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task, TaskID, TextColumn
from rich.progress_bar import ProgressBar
from rich.text import Text

from horizonrl.ops.models.models import Tell
from horizonrl.ops.terminal.figures import clock, duration

WORTH_TELLING_S = 1.0
TELLING = 0.02
"""Share of the work after which its pace predicts how long the rest takes."""


@contextmanager
def waiting(console: Console, what: str, *, announced: bool = False) -> Iterator[Tell]:
    """Show that something takes a while, how far it is, and how long it took.

    On a terminal this is one moving line, which becomes `what: 12 s`. Elsewhere each report is a line of its own, after
    `what ...` if `announced`.
    """
    if not console.is_terminal:
        if announced:
            _say(console, f"{what} ...")
        yield lambda text, share: _say(console, f"  {text}")
        return
    started = time.monotonic()
    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), _Bar(), _Time()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda text, share: _tell(progress, task, text, share)
    if (took_s := time.monotonic() - started) > WORTH_TELLING_S:
        _say(console, f"{what}: {duration(took_s)}")


class _Bar(ProgressColumn):
    """A bar, once the share that is done has been reported."""

    def render(self, task: Task) -> RenderableType:
        return (
            ProgressBar(total=1.0, completed=task.completed, width=24) if task.total else Text("")
        )


class _Time(ProgressColumn):
    def render(self, task: Task) -> RenderableType:
        return Text(remaining(task.elapsed or 0.0, task.completed if task.total else None))


def _tell(progress: Progress, task: TaskID, text: str, share: float | None) -> None:
    progress.update(task, description=text)
    if share is not None:
        # The total is set only now: without one, the bar and the time left are not shown.
        progress.update(task, total=1.0, completed=share)


def remaining(elapsed_s: float, share: float | None) -> str:
    """Return `0:42`, with `, about 3 min left` once the pace is known."""
    if share is None or share < TELLING:
        return clock(elapsed_s)
    return f"{clock(elapsed_s)}, about {duration(elapsed_s * (1 - share) / share)} left"


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True)
