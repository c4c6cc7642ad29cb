"""How a reply names its action, and how an expert writes one. Pure functions that never execute what an agent writes.

react     "Thought: ..." then "Action: ...": the action is the first line after the only `Action:`
plain     the action alone: the first line that is not empty
function  a JSON object {"thought": ..., "function_name": ..., "arguments": {...}}
code      a fenced Python block with one call: its syntax tree is read, never run
native    a call of a tool in the syntax of the model's own chat template, read by actors/rollout/replies.py

An environment's action is one line of words, such as `craft 4 sticks using 2 planks`; a query of SQL may have more. In
the formats `function`, `code` and `native`, a reply calls one of the environment's `Command`s; reading it fills the
command's words with the arguments.
"""

import ast
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from horizonrl.common.texts import read_object
from horizonrl.envs.api import Reply, ToolCall, Tools

WrittenFormat = Literal["react", "plain", "function", "code"]
"""The formats of environments that offer no tools (api.OffersTools)."""
ActionFormat = WrittenFormat | Literal["native"]

# Not the end of another word, such as "reaction:"; a digit, `_` or `*` may stand before.
_ACTION = re.compile(r"(?<![A-Za-z])action\s*:", re.IGNORECASE)
_THOUGHT = re.compile(r"(?<![A-Za-z])thought\s*:", re.IGNORECASE)
_FENCE = "```"
_LANGUAGE = re.compile(r"(\w*)[ \t]*\n")
_HOLE = re.compile(r"\{(\w+)\}")
MAX_ACTION_CHARS = 2_000
"""The longest action that an environment follows. Actions of this length still take microseconds."""
MAX_DIGITS = 1_000
"""The most digits of a number in a call."""
_MAX_CALL_CHARS = 10_000
"""Longer texts are not parsed, because the recursion depth of the parsers grows with the length."""


@dataclass(frozen=True)
class Command:
    """One kind of action: a function `name`, the `words` of the action with arguments in braces, and the `meaning`.

    Example: `Command("craft", "craft {item} using {ingredients}", "follow one recipe once")`.
    """

    name: str
    words: str
    meaning: str
    lines: bool = False
    """Whether an argument of a call may have several lines; otherwise they are joined to one."""

    @cached_property
    def arguments(self) -> tuple[str, ...]:
        return tuple(_HOLE.findall(self.words))

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Matches an action of this kind, with one group per argument."""
        parts = _HOLE.split(self.words)
        return re.compile(
            # Lazy, so that an argument ends where the words that follow it first occur.
            "".join(
                f"(?P<{part}>.+?)" if index % 2 else re.escape(part)
                for index, part in enumerate(parts)
            )
        )

    def __str__(self) -> str:
        return f"{self.name}({', '.join(self.arguments)}): {self.meaning}"


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A text that does not name exactly one action. The agent reads the `reason`."""

    reason: str


def read_action(
    text: str, action_format: ActionFormat, commands: Sequence[Command] = ()
) -> str | Unreadable:
    """Return the action that the text names: one stripped line of at most MAX_ACTION_CHARS, never empty."""
    match action_format:
        case "plain":
            return bound_length(
                _first_line(text) or Unreadable("The reply is empty. Reply with one action.")
            )
        case "react":
            return bound_length(_read_react(text))
        case "function":
            return bound_length(_read_function(text, commands))
        case "code":
            return bound_length(_read_code(text, commands))
        case "native":
            return Unreadable("There is no call of a tool in the reply. Call one of the tools.")


def read_call(call: ToolCall, commands: Sequence[Command]) -> str | Unreadable:
    """Return the action that a call of a tool names, with the limits of `read_action`."""
    short = len(call.arguments) < _MAX_CALL_CHARS
    if not short or (arguments := read_object(call.arguments or "{}")) is None:
        return Unreadable(
            f"The arguments of a call are a JSON object of at most {_MAX_CALL_CHARS} characters."
        )
    return bound_length(_fill(call.name, arguments, commands))


def bound_length(action: str | Unreadable) -> str | Unreadable:
    """Return the action unchanged, or Unreadable if it is too long."""
    if isinstance(action, str) and len(action) > MAX_ACTION_CHARS:
        return Unreadable(
            f"An action has {MAX_ACTION_CHARS} characters at most; this one has {len(action)}."
        )
    return action


def write_reply(
    action: str, thought: str, action_format: ActionFormat, commands: Sequence[Command] = ()
) -> Reply:
    """Return a reply that takes the action: the inverse of `read_action`. The format `plain` omits the thought.

    Raises ValueError if the format is a call and no command has these words.
    """
    match action_format:
        case "plain":
            return Reply(action)
        case "react":
            return Reply(f"Thought: {thought}\nAction: {action}")
    if (command := match_command(action, commands)) is None:
        words = ", ".join(command.words for command in commands)
        raise ValueError(f"no command has the words of {action!r}; there are {words}")
    name, arguments = command
    match action_format:
        case "function":
            call = {"thought": thought, "function_name": name, "arguments": arguments}
            return Reply(json.dumps(call, ensure_ascii=False))
        case "code":
            written = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
            # Without the newlines of the thought: the second line of a comment would be code.
            return Reply(f"```python\n# {' '.join(thought.split())}\n{name}({written})\n```")
        case "native":
            return Reply(thought, (ToolCall(name, json.dumps(arguments, ensure_ascii=False)),))


def match_command(action: str, commands: Sequence[Command]) -> tuple[str, dict[str, str]] | None:
    """Return the name and the arguments of the first command whose words match the action."""
    for command in commands:
        if match := command.pattern.fullmatch(action):
            return command.name, match.groupdict()
    return None


def make_tools(commands: Sequence[Command]) -> Tools:
    """Return the commands as tools. Every argument is a text."""
    return tuple(
        {
            "type": "function",
            "function": {
                "name": command.name,
                "description": command.meaning,
                "parameters": {
                    "type": "object",
                    "properties": {argument: {"type": "string"} for argument in command.arguments},
                    "required": list(command.arguments),
                },
            },
        }
        for command in commands
    )


def explain(action_format: ActionFormat, commands: Sequence[Command]) -> str:
    """Return the instructions on how to reply: the format and, if it is a call, the functions."""
    functions = "\n".join(map(str, commands))
    match action_format:
        case "plain":
            return "Reply with the command alone."
        case "native":
            return "Act by calling one tool at a time."
        case "react":
            return 'Reply with a line "Thought: " and what you think, then a line "Action: " and one command.'
        case "function":
            form = '{"thought": "why", "function_name": "name", "arguments": {"argument": "value"}}'
            return f"Reply with one JSON object of the form {form}. The functions:\n{functions}"
        case "code":
            return (
                "Reply with one Python block: a comment that says what you think, then one call with literal "
                f"arguments, between a line ```python and a line ```. The functions:\n{functions}"
            )


def explain_briefly(
    action_format: ActionFormat, commands: Sequence[Command], action: str = "command"
) -> str:
    """Return instructions for small models; none for `plain`, where a reply is nothing but the action."""
    match action_format:
        case "plain":
            return ""
        case "react":
            return f"Reply in two lines:\nThought: why\nAction: {action}"
    return explain(action_format, commands)


def _read_react(text: str) -> str | Unreadable:
    parts = _ACTION.split(text)
    if len(parts) == 1:
        return Unreadable(
            'There is no "Action:" in the reply. Write a thought, then one action after "Action:".'
        )
    # As AgentGym's clients do. The second action rests on an answer that the model has only imagined.
    if len(parts) > 2:
        return Unreadable(
            f"There are {len(parts) - 1} actions in the reply. Take one action at a time."
        )
    # A model that keeps generating may start its next thought on the action's own line.
    action = _THOUGHT.split(_first_line(parts[1]))[0].strip()
    return action or Unreadable('There is nothing after "Action:". Write one action there.')


def _read_function(text: str, commands: Sequence[Command]) -> str | Unreadable:
    # From the first brace to the last: models like to write words around the object.
    start, end = text.find("{"), text.rfind("}")
    if (
        not 0 <= start < end < _MAX_CALL_CHARS
        or (call := read_object(text[start : end + 1])) is None
    ):
        return Unreadable(
            "There is no JSON object in the reply. Reply with one that names a function."
        )
    name, arguments = call.get("function_name"), call.get("arguments", {})
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return Unreadable('The object needs "function_name", a text, and "arguments", an object.')
    return _fill(name, arguments, commands)


def find_fenced(text: str, *languages: str) -> list[str]:
    """Return the fenced blocks of these languages, given in lower case; `""` stands for a fence without a language.

    Takes one pass. A regular expression for both fences would search to the end again from each opening fence, which
    takes quadratic time on a reply that is full of them.
    """
    blocks, start = [], text.find(_FENCE)
    while start >= 0:
        opened = _LANGUAGE.match(text, start + len(_FENCE))
        if opened is None or opened[1].lower() not in languages:
            start = text.find(_FENCE, start + len(_FENCE))
            continue
        end = text.find(_FENCE, opened.end())
        if end < 0:
            break
        blocks.append(text[opened.end() : end])
        start = text.find(_FENCE, end + len(_FENCE))
    return blocks


def _read_code(text: str, commands: Sequence[Command]) -> str | Unreadable:
    blocks = find_fenced(text[:_MAX_CALL_CHARS], "python", "py", "")
    if len(blocks) != 1:
        return Unreadable(
            f"There are {len(blocks)} Python blocks in the reply. Write one, with one call."
        )
    try:
        with warnings.catch_warnings():
            # A SyntaxWarning about "\\d" in a reply helps nobody who reads our stderr.
            warnings.simplefilter("ignore")
            statements = ast.parse(blocks[0]).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return Unreadable("The block is not Python. Write one call in it.")
    match statements:
        case [ast.Expr(ast.Call(func=ast.Name(name)) as call)]:
            return _fill_call(name, call, commands)
    return Unreadable("The block is not one call of a function. Take one action at a time.")


def _fill_call(name: str, call: ast.Call, commands: Sequence[Command]) -> str | Unreadable:
    try:
        positional = [ast.literal_eval(argument) for argument in call.args]
        # `**arguments` has no name and is left out here, so that the counts below differ and the call is rejected.
        named = {
            str(keyword.arg): ast.literal_eval(keyword.value)
            for keyword in call.keywords
            if keyword.arg
        }
    # What Python's documentation lists for malformed literals.
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return Unreadable(
            f"An argument of {name} is no literal. Write texts and numbers as they are."
        )
    names = next((command.arguments for command in commands if command.name == name), ())
    if len(positional) > len(names) or len(positional) + len(named) != len(call.args) + len(
        call.keywords
    ):
        return Unreadable(f"{name} takes {len(names)} arguments: {', '.join(names) or 'none'}.")
    return _fill(name, dict(zip(names, positional, strict=False)) | named, commands)


def _fill(name: str, arguments: Mapping[str, Any], commands: Sequence[Command]) -> str | Unreadable:
    """Return the words of the command `name` with these arguments."""
    command = next((command for command in commands if command.name == name), None)
    if command is None:
        return Unreadable(
            f"There is no function {name[:50]!r}. There are: {', '.join(c.name for c in commands)}."
        )
    if set(arguments) != set(command.arguments):
        return Unreadable(f"The arguments of {name} are: {', '.join(command.arguments) or 'none'}.")
    values = {key: write_value(value) for key, value in arguments.items()}
    if None in values.values():
        return Unreadable(
            f"The arguments of {name} are texts, or numbers of at most {MAX_DIGITS} digits."
        )
    if not command.lines:  # a newline in an argument must not become a second line of the action
        values = {key: " ".join((value or "").split()) for key, value in values.items()}
    action = _HOLE.sub(lambda hole: values[hole[1]] or "", command.words).strip()
    return action or Unreadable(f"The arguments of {name} are empty.")


def write_value(value: object) -> str | None:
    """Return the text of an argument, or None if it is neither a text nor a number of at most MAX_DIGITS digits.

    Python raises on an integer of more than 4,300 digits, and an escape in a literal may be a lone surrogate.
    """
    match value:
        case int() if abs(value) >= 10**MAX_DIGITS:
            return None
        case str() | int() | float():
            return str(value).encode("utf-8", "replace").decode()
    return None


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")
