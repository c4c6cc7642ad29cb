"""The texts that are ours: the commands, and the rules before the simulator's first observation."""

from horizonrl.envs.formats import ActionFormat, Command, explain, explain_briefly
from horizonrl.envs.game import Style

COMMANDS = (
    Command("open", "open {object}", "open a container or a door"),
    Command("close", "close {object}", "close a container or a door"),
    Command("activate", "activate {object}", "turn a device on"),
    Command("deactivate", "deactivate {object}", "turn a device off"),
    Command("connect", "connect {object} to {other}", "connect electrical components"),
    Command("disconnect", "disconnect {object}", "disconnect electrical components"),
    Command("use_on", "use {object} on {other}", "use a tool on something"),
    Command("use", "use {object}", "use a device"),
    Command("look_around", "look around", "describe the room"),
    Command("look_at", "look at {object}", "describe an object in detail"),
    Command("look_in", "look in {object}", "describe a container's contents"),
    Command("read", "read {object}", "read a note or a book"),
    Command("move", "move {object} to {other}", "move an object into a container"),
    Command("pick_up", "pick up {object}", "move an object to the inventory"),
    Command("put_down", "put down {object}", "drop an inventory item"),
    Command("pour", "pour {object} into {other}", "pour a liquid into a container"),
    Command("dunk", "dunk {object} into {other}", "dunk a container into a liquid"),
    Command("mix", "mix {object}", "mix a container's contents"),
    Command("go_to", "go to {place}", "move to another room"),
    Command("eat", "eat {object}", "eat a food"),
    Command("flush", "flush {object}", "flush a toilet"),
    Command("focus_on", "focus on {object}", "signal what the task asks for; a wrong one loses it"),
    Command("wait", "wait", "let ten moments pass"),
    Command("wait_once", "wait1", "let one moment pass"),
    Command("task", "task", "describe the task"),
    Command("inventory", "inventory", "list what you carry"),
    Command("valid_actions", "valid actions", "list what can be done now; the list is long"),
    Command("choose", "{number}", "answer the question which of several you mean"),
)
VALID_ACTIONS = "valid actions"

_FULL = """\
You do experiments in a house of several rooms. Each turn you give one command. A score says how far the task is; it is
solved at 100. OBJ is an object as it is named in what you see, such as a metal pot, or metal pot in kitchen.
"""


def first_observation(task: str, seen: str, style: Style, action_format: ActionFormat) -> str:
    """Return the rules, the task and the first look around."""
    if style == "agentgym":
        return f"{task}\n{seen}"
    if style == "compact":
        words = " | ".join(_words(command) for command in COMMANDS)
        reply = explain_briefly(action_format, COMMANDS)
        return "\n".join(filter(None, (f"Commands: {words}", reply, task, seen)))
    rules = "\n".join(f"{_words(command)}: {command.meaning}" for command in COMMANDS)
    return f"{_FULL}{rules}\n{explain(action_format, COMMANDS)}\n\n{task}\n{seen}"


def _words(command: Command) -> str:
    names = {"object": "OBJ", "other": "OBJ", "place": "ROOM", "number": "NUMBER"}
    return command.words.format(**{argument: names[argument] for argument in command.arguments})
