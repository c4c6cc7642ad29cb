"""How an agent's text names its action, and how an expert writes one. Pure functions; nothing is ever evaluated.

react   "Thought: ..." then "Action: ...": the action is the first line after `Action:`, and there is only one
plain   the action alone: the first line that is not empty
"""

import re
from dataclasses import dataclass
from typing import Literal

ActionFormat = Literal["react", "plain"]

_ACTION = re.compile(r"action\s*:", re.IGNORECASE)
_THOUGHT = re.compile(r"thought\s*:", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A text without exactly one action. `reason` is what the agent is told."""

    reason: str


def read_action(text: str, action_format: ActionFormat) -> str | Unreadable:
    """Return the action that the text names: one stripped line, never empty."""
    match action_format:
        case "plain":
            return _first_line(text) or Unreadable("The reply is empty. Reply with one action.")
        case "react":
            return _read_react(text)


def write_action(action: str, thought: str, action_format: ActionFormat) -> str:
    """Return the text of a reply that takes an action; `read_action` of it returns the action. Plain has no thought."""
    match action_format:
        case "plain":
            return action
        case "react":
            return f"Thought: {thought}\nAction: {action}"


def _read_react(text: str) -> str | Unreadable:
    parts = _ACTION.split(text)
    if len(parts) == 1:
        return Unreadable('There is no "Action:" in the reply. Write a thought, then one action after "Action:".')
    if len(parts) > 2:
        return Unreadable(f"There are {len(parts) - 1} actions in the reply. Take one action at a time.")
    # A second thought on the action's own line is where a model runs on; it is not part of the action.
    action = _THOUGHT.split(_first_line(parts[1]))[0].strip()
    return action or Unreadable('There is nothing after "Action:". Write one action there.')


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")
