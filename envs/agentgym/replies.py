"""What AgentGym's own clients send of an agent's reply, rule for rule: pure functions.

A reply that they answer themselves, without asking the server, is `Unreadable`; the agent reads the reason, for a
reward of 0.
"""

import re

from horizonrl.envs.formats import Unreadable

_END = "</s>"
_LABEL = "Action:"
_ACTION = re.compile(r"Action:\s*([^\n]*)")
_DROPPED = re.compile(r"[^A-Za-z0-9, ]+")
_FENCE = "```"


def only_action(text: str) -> str | Unreadable:
    """Return the line after `Action:`, of letters, digits, commas and single spaces; empty where there is none."""
    actions = _ACTION.findall(text)
    if len(actions) > 1:
        return Unreadable("Error: Only one 'Action' is allowed per response. Please adjust your response.")
    return " ".join(_DROPPED.sub("", "".join(actions)).split())


def last_action(text: str) -> str:
    """Return what follows the last `Action:`; without one, the text where it holds a call of a shop, else nothing."""
    _, label, action = text.removesuffix(_END).rpartition(_LABEL)
    return action.strip() if label or "search[" in action or "click[" in action else ""


def first_action(text: str) -> str:
    """Return what stands between the first `Action:` and the next; the whole text where there is none."""
    parts = text.removesuffix(_END).split(_LABEL)
    return parts[min(1, len(parts) - 1)].strip()


def last_sql(text: str) -> str:
    """Return the last fenced block of SQL; text without a fence counts as one."""
    return text.split(f"{_FENCE}sql")[-1].split(_FENCE)[0].strip()


def whole_if_fenced(text: str) -> str | Unreadable:
    """Return the text where it holds a fenced block."""
    if text.count(_FENCE) < 2:
        return Unreadable(
            "Cannot parse action from response. Your action should be inside triple backticks (```). "
            "Please adjust accordingly."
        )
    return text


def whole(text: str) -> str:
    """Return the text as it is."""
    return text
