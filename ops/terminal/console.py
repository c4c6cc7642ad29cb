"""The terminal that every command prints to: text is text.

rich would read `pip install 'horizonrl[envs]'` as markup and leave out the bracket, and end at an agent's `[/b]`. It
lets escape sequences through, so an agent's last words could set the operator's clipboard.
"""

from collections.abc import Iterable
from typing import IO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from horizonrl.common.texts import printable


class _PlainConsole(Console):
    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            safe = segment.control or segment.text.isprintable()
            yield segment if safe else Segment(printable(segment.text), segment.style)


def plain_console(
    file: IO[str] | None = None, *, stderr: bool = False, width: int | None = None
) -> Console:
    """Return a console on which nothing is markup, an emoji (`:key:`) or an escape sequence of a text.

    It writes to stdout, to stderr or to `file`.
    """
    return _PlainConsole(file=file, stderr=stderr, width=width, markup=False, emoji=False)
