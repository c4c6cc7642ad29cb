"""What a stranger's text can do to a terminal: nothing but show."""

import io

import pytest
from rich.table import Table
from rich.text import Text

from horizonrl.common.texts import printable
from horizonrl.ops.terminal.console import plain_console

CLIPBOARD, CLEAR, TITLE, C1, BIDI = (
    "\x1b]52;c;cm0=\x1b\\",
    "\x1b[2J",
    "\x1b]0;t\x07",
    "\x9b2J",
    "\u202egnp.exe",
)


@pytest.mark.parametrize(
    "harm", [CLIPBOARD, CLEAR, TITLE, C1, BIDI, "over\rwritten", "\x08\x7f", "\u2066"]
)
def test_no_text_moves_the_cursor_sets_the_clipboard_or_turns_the_text_around(harm: str) -> None:
    table = Table(title=harm)
    table.add_row(harm, Text(harm, style="bold"))
    for renderable in (harm, Text(harm, style="red"), table):
        out = io.StringIO()
        plain_console(out, width=60).print(renderable)
        assert not set(out.getvalue()) & set("\x1b\x9b\u202e\u2066\r\x07\x08\x7f")


def test_the_console_keeps_lines_tabs_and_letters() -> None:
    out = io.StringIO()
    plain_console(out, width=60).print("a\tb\nc [b] :smile:", "näme 日本")
    assert "c [b] :smile: näme 日本" in out.getvalue()
    assert "a" in out.getvalue().splitlines()[0] and len(out.getvalue().splitlines()) == 2


def test_printable_keeps_lines_and_tabs_and_is_cut() -> None:
    assert printable("a\r\nb\tc\ud800\x1b[2J") == "a\nb\tc??[2J"
    assert printable("x" * 9, 4) == "xxxx"
