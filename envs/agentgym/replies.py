"""Which part of a reply AgentGym's own clients send to the server. Pure functions that follow those clients exactly.

If a client answers a reply itself without calling the server, the reply is `Unreadable`: the agent reads the reason and
gets a reward of 0.
"""

import re

from horizonrl.envs.formats import Unreadable

_END = "</s>"
_LABEL = "Action:"
_ACTION = re.compile(r"Action:\s*([^\n]*)")
_DROPPED = re.compile(r"[^A-Za-z0-9, ]+")
_FENCE = "```"


def only_action(text: str) -> str | Unreadable:
    """Return the line after `Action:`, reduced to letters, digits, commas and single spaces; empty without one."""
    actions = _ACTION.findall(text)
    if len(actions) > 1:
        return Unreadable(
            "Error: Only one 'Action' is allowed per response. Please adjust your response."
        )
    return " ".join(_DROPPED.sub("", "".join(actions)).split())


def last_action(text: str) -> str:
    """Return what follows the last `Action:`. Without one, return the text if it has a shop's call, else nothing."""
    _, label, action = text.removesuffix(_END).rpartition(_LABEL)
    return action.strip() if label or "search[" in action or "click[" in action else ""


def first_action(text: str) -> str:
    """Return the text between the first `Action:` and the next one; without one, the whole text."""
    parts = text.removesuffix(_END).split(_LABEL)
    return parts[min(1, len(parts) - 1)].strip()


def last_sql(text: str) -> str:
    """Return the last fenced block of SQL; a text without a fence counts as a block."""
    return text.split(f"{_FENCE}sql")[-1].split(_FENCE)[0].strip()


def whole_if_fenced(text: str) -> str | Unreadable:
    """Return the text if it has a fenced block."""
    if text.count(_FENCE) < 2:
        return Unreadable(
            "Cannot parse action from response. Your action should be inside triple backticks (```). "
            "Please adjust accordingly."
        )
    return text


def whole(text: str) -> str:
    """Return the text unchanged."""
    return text
