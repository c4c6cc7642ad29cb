"""Length limits of texts. Replies and later observations are cut; a first observation is never cut, only rejected."""

from typing import Annotated

from pydantic import Field

from horizonrl.common.errors import ConfigError

Chars = Annotated[int, Field(ge=64)]
"""The type of `max_observation_chars`: a limit on every observation of an environment."""
MAX_OBSERVATION_CHARS = 8_192
MAX_REPLY_CHARS = 65_536
"""Characters of a reply that an environment reads. Parsers run in the event loop, where every other episode waits."""
MAX_CALLS = 8
"""Calls of one reply that are made. With more, a reply could be as long as an episode."""


def readable(reply: str) -> str:
    """Return the part of a reply that environments read: MAX_REPLY_CHARS characters, with `?` for lone surrogates.

    A lone surrogate cannot be encoded as UTF-8, so it would raise wherever a text leaves the process.
    """
    # Cut first: the cost must not grow with the length of a reply.
    return reply[:MAX_REPLY_CHARS].encode("utf-8", "replace").decode()


def whole(text: str, task_id: str, chars: int) -> str:
    """Return a first observation unchanged. Raises ConfigError if it is too long: a cut one may lose the task."""
    if len(text) > chars:
        raise ConfigError(
            f"the first observation of {task_id!r} has {len(text)} characters and max_observation_chars is {chars}: "
            "raise the limit, use style 'compact', or set the environment's other options to show less"
        )
    return text


def clip(text: str, chars: int = 60) -> str:
    """Return a text cut to `chars`. The default is for an agent's own words when an answer quotes them."""
    return text if len(text) <= chars else text[: chars - 3] + "..."
