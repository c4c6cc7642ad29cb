"""`horizonrl config --explain KEY`: what a key means, what it takes, its default, and the kinds that have it."""

import re
import textwrap

from horizonrl.common.errors import ConfigError, did_you_mean
from horizonrl.ops.pages.configuration import KeyRow, keys

WIDTH = 80
LINK = re.compile(r"\[[\w-]+\]\(([\w-]+\.md)\)")


def explain(name: str) -> str:
    """Return the text on a key, or on every key of a section. Raises ConfigError for an unknown name."""
    name = name.removeprefix("--")
    rows = [key for key in keys() if name in (key.section, f"{key.section}.{key.name}")]
    if not rows:
        names = [f"{key.section}.{key.name}" for key in keys()]
        raise ConfigError(
            f"{name}: no such key{did_you_mean(name, names)} Keys are written section.key"
        )
    return "\n\n".join(map(_text, rows))


def _text(key: KeyRow) -> str:
    kinds = f" (with kind {', '.join(key.kinds)})" if key.kinds else ""
    lines = [f"{key.section}.{key.name}{kinds}: {key.values}", key.meaning]
    plain = [LINK.sub(r"docs/\1", line.replace("`", "").replace("\\|", "|")) for line in lines]
    return "\n".join(
        textwrap.fill(line, WIDTH, initial_indent=indent, subsequent_indent="    ")
        for line, indent in zip(plain, ("", "    "), strict=True)
    )
