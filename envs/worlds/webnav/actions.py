"""The actions of a web agent, by WebArena's names and words."""

import re
from collections.abc import Sequence

from horizonrl.envs.formats import Command

COMMANDS = (
    Command("click", "click [{id}]", "click an element"),
    Command(
        "type", "type [{id}] [{text}] [{press_enter_after}]", "fill a textbox; 1: and press Enter"
    ),
    Command("hover", "hover [{id}]", "point at an element"),
    Command("press", "press [{key}]", "press a key, such as Enter"),
    Command("scroll", "scroll [{direction}]", "scroll the page, down or up"),
    Command("goto", "goto [{url}]", "open an address"),
    Command("go_back", "go_back", "return to the page before"),
    Command("go_forward", "go_forward", "undo go_back"),
    Command("new_tab", "new_tab", "open an empty tab"),
    Command("tab_focus", "tab_focus [{number}]", "switch to a tab"),
    Command("close_tab", "close_tab", "close the tab"),
    Command("stop", "stop [{answer}]", "end with the answer, or with done when none was asked for"),
)

_TYPE_WITHOUT_ENTER = re.compile(r"type \[[^]]*\] \[[^]]*\]")
_UNANSWERED = ("stop", "stop []")


def read_command(
    action: str, commands: Sequence[Command] = COMMANDS
) -> tuple[str, dict[str, str]] | None:
    """Return a command's name and arguments; None when no command has these words.

    As in WebArena `type` presses Enter unless told not to, and three backticks around an action do not matter.
    """
    line = action.strip("` ")
    if line in _UNANSWERED:
        line = "stop [ ]"
    if _TYPE_WITHOUT_ENTER.fullmatch(line):
        line += " [1]"
    name, bracket, rest = line.partition(" [")
    command = next((command for command in commands if command.name == name), None)
    if command is None or bool(bracket) != bool(command.arguments):
        return None
    # Split rather than matched: a pattern of three arguments takes cubic time for a text of brackets.
    values = (
        rest.removesuffix("]").split("] [", len(command.arguments) - 1)
        if rest.endswith("]")
        else []
    )
    if not all(values) or len(values) != len(command.arguments):
        return None
    return name, dict(zip(command.arguments, values, strict=True))
