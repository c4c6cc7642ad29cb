"""A conversation's messages, as a chat template reads them and with what is dangerous in them disguised."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, TypeVar

from horizonrl.common.errors import ConfigError
from horizonrl.common.texts import read_object
from horizonrl.envs.api import ToolCall, Tools

__all__ = [
    "THINK",
    "THOUGHT",
    "ChatMessage",
    "Disguise",
    "Message",
    "ToolCall",
    "Tools",
    "as_template_reads",
]

T = TypeVar("T")

THINK, THOUGHT = "<think>", "</think>"

MARKS = tuple(map(chr, range(0xE000, 0xF900)))
"""Private characters: Unicode gives them no meaning."""

FIELDS = frozenset(
    (
        *(
            "role",
            "content",
            "reasoning_content",
            "name",
            "arguments",
            "id",
            "type",
            "tool_calls",
            "tool_call_id",
        ),
        *(
            "function",
            "description",
            "parameters",
            "properties",
            "required",
            "items",
            "enum",
            "default",
            "anyOf",
        ),
    )
)
ROLES_AND_TYPES = frozenset(
    (
        *("system", "user", "assistant", "tool", "function"),
        *("object", "array", "string", "integer", "number", "boolean", "null"),
    )
)
"""What templates ask for by name, as keys and as values of `role` and `type`. None is broken, though it may be a part
of a special token, as in <|user|> and <filename>."""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message. `calls` and `reasoning` are an assistant's."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""


Message = ChatMessage
"""Where nothing else is called so: the broker has messages too."""


def as_template_reads(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Return the messages in the form that templates are written for. Results belong to the calls by their position.

    Raises ConfigError if the arguments of a call are no JSON object.
    """
    conversation: list[dict[str, Any]] = []
    called: list[tuple[str, str]] = []
    """(id, name) of the calls that have no result yet."""
    for position, message in enumerate(messages):
        entry: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.reasoning:
            entry["reasoning_content"] = message.reasoning
        if message.role == "tool":
            call_id, name = called.pop(0) if called else (f"c{position:08d}", "")
            entry |= {"tool_call_id": call_id, "name": name}
        elif message.calls:
            # Nine letters and digits: what the strictest templates in use ask for.
            called = [
                (f"c{position:04d}{index:04d}", call.name)
                for index, call in enumerate(message.calls)
            ]
            entry["tool_calls"] = [
                {
                    "id": call_id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": read_arguments(call)},
                }
                for (call_id, _), call in zip(called, message.calls, strict=True)
            ]
        conversation.append(entry)
    return conversation


def read_arguments(call: ToolCall) -> dict[str, Any]:
    """Return the arguments as templates take them. Raises ConfigError if they are no JSON object."""
    if (arguments := read_object(call.arguments or "{}")) is None:
        raise ConfigError(
            f"the arguments of a call of {call.name[:80]!r} are no JSON object: {call.arguments[:80]!r}"
        )
    return arguments


class Disguise:
    """Breaks every special token that a text spells, so that those of a rendering are the template's own.

    A mark, one character that occurs nowhere in the conversation, is put before each of them, and before each end or
    beginning of one that could become one together with its neighbours in the template.
    """

    def __init__(self, special: Iterable[str]) -> None:
        self._special = tuple(special)
        self._starts = {token[:end] for token in self._special for end in range(1, len(token))}
        self._ends = {token[start:] for token in self._special for start in range(1, len(token))}
        self._longest = max(map(len, self._special), default=0)

    def mark_for(self, messages: Iterable[ChatMessage | Mapping[str, Any]]) -> str:
        """Return a character that does not occur in these messages and tools. Raises ConfigError if all do."""
        written = "".join(map(repr, messages))
        # `repr` spells private characters as escapes.
        mark = next((mark for mark in MARKS if f"\\u{ord(mark):04x}" not in written), None)
        if mark is None:
            raise ConfigError(
                f"a conversation has all {len(MARKS)} private characters of Unicode: leave one out"
            )
        return mark

    def hide(self, value: T, mark: str) -> T:
        """Return a text, or a structure of texts, with every special token in it broken."""
        if not mark:
            return value
        hidden: Any = value
        match value:
            case str():
                hidden = self._broken(value, mark)
            case Mapping():
                hidden = {
                    key if key in FIELDS else self.hide(key, mark): self._hide_part(key, part, mark)
                    for key, part in value.items()
                }
            case list() | tuple():
                hidden = [self.hide(part, mark) for part in value]
        return hidden  # type: ignore[no-any-return]

    def _hide_part(self, key: str, part: Any, mark: str) -> Any:
        named = key in ("role", "type") and isinstance(part, str) and part in ROLES_AND_TYPES
        return part if named else self.hide(part, mark)

    def _broken(self, text: str, mark: str) -> str:
        if not text:
            return text
        sizes = range(1, min(self._longest, len(text) + 1))
        places = {len(text) - size for size in sizes if text[-size:] in self._starts}
        if any(text[:size] in self._ends for size in sizes) or any(
            text in token for token in self._special
        ):
            places.add(0)
        for token in self._special:
            position = text.find(token)
            while position >= 0:
                places.add(position)
                position = text.find(token, position + 1)
        cuts = (0, *sorted(places), len(text))
        return mark.join(text[start:end] for start, end in pairwise(cuts))
