"""The terminal that every command prints to: text is text.

rich would read `pip install 'horizonrl[envs]'` as markup and leave out the bracket, and end at an agent's `[/b]`.
"""

from typing import IO

from rich.console import Console


def plain_console(file: IO[str] | None = None, *, stderr: bool = False, width: int | None = None) -> Console:
    """Return a console of stdout, of stderr or of a file, on which nothing is markup, nor `:key:` an emoji."""
    return Console(file=file, stderr=stderr, width=width, markup=False, emoji=False)
