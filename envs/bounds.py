"""How long a text may be: a reply is cut, a first observation is whole or refused, a later one is cut."""

from typing import Annotated

from pydantic import Field

from horizonrl.common.errors import ConfigError

Chars = Annotated[int, Field(ge=64)]
"""A bound on every observation of an environment."""
MAX_OBSERVATION_CHARS = 8_192
MAX_REPLY_CHARS = 65_536
"""How much of an agent's reply an environment reads. Parsers run in the event loop, where every other episode waits."""


def readable(reply: str) -> str:
    """Return what an environment reads of a reply: its first MAX_REPLY_CHARS characters, and `?` for a lone surrogate.

    Half a character cannot be encoded, so it would fail wherever a text leaves the process.
    """
    return reply[:MAX_REPLY_CHARS].encode("utf-8", "replace").decode()


def whole(text: str, task_id: str, chars: int) -> str:
    """Return a first observation; it says what the task is and is never cut. Raises ConfigError if it is longer."""
    if len(text) > chars:
        raise ConfigError(
            f"the first observation of {task_id!r} has {len(text)} characters and max_observation_chars is {chars}: "
            "raise it, take style 'compact', or show less by the environment's other options"
        )
    return text


def clip(text: str, chars: int = 60) -> str:
    """Return a text cut to a length. By default: how much of an agent's own words an answer repeats."""
    return text if len(text) <= chars else text[: chars - 3] + "..."
