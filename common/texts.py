"""Texts that an agent, an environment or a stranger's run wrote, made safe for a terminal, a record and a reader."""

import json
import re
from typing import Any

_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 and C1: escape sequences move the cursor and set the clipboard
    "\u202a-\u202e\u2066-\u2069"  # bidirectional overrides show a text in another order
    "\ud800-\udfff]"  # halves of a character, which no encoding takes
)


def printable(text: str, chars: int | None = None) -> str:
    """Return the first `chars` characters, with `?` for each one that would do anything but show.

    Line feeds and tabs stay; CR LF becomes a line feed.
    """
    return _UNPRINTABLE.sub("?", text[:chars].replace("\r\n", "\n"))


def read_object(text: str | bytes) -> dict[str, Any] | None:
    """Return the JSON object that a text holds, or None if it holds none, or one that is nested too deeply to read."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
