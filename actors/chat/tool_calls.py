"""Reading the calls in a reply: the seam that the parsers of a model's family stand behind.

A reply is made of whole calls or it is text. A call that was cut off, that is malformed, or that a parser loses turns
the whole reply into text, because nobody may guess at what a policy meant.
"""

import re
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

from horizonrl.actors.chat.messages import THINK, THOUGHT, ChatMessage
from horizonrl.actors.chat.template import ChatTemplate
from horizonrl.common.errors import ConfigError, MissingDependency
from horizonrl.common.imports import uncollected
from horizonrl.common.texts import read_object
from horizonrl.envs.api import ToolCall, Tools

FINDER = "horizonrl.actors.engines.vllm_tools"
"""Imported when tools are used: it takes seconds, and needs vLLM."""
_TAG = r"<[^<>\s]+>|\[\w+\]"
_FIRST_TAG, _LAST_TAG = re.compile(rf"\s*({_TAG})"), re.compile(rf"({_TAG})\s*$")


@dataclass(frozen=True, slots=True)
class Parsed:
    """What a reply says: its words without calls and thoughts, its thoughts, and its calls in order."""

    content: str
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()


class ToolParser(Protocol):
    """Reads replies of one model family."""

    @property
    def name(self) -> str: ...

    def parse(self, text: str, tools: Tools) -> Parsed: ...


@dataclass(frozen=True, slots=True)
class NoCalls:
    """Reads every reply as text: for a template that knows no tools."""

    name: str = "none"

    def parse(self, text: str, tools: Tools) -> Parsed:
        reasoning, content = divided(text)
        return Parsed(content, reasoning)


def parser_for(chat: ChatTemplate, name: str | None = None) -> ToolParser:
    """Return the parser that reads the calls which the chat template writes, or the one of that name ("none" for none).

    Raises ConfigError if the template knows no tools or no parser reads its calls, MissingDependency without vLLM.
    """
    if name == "none":
        return NoCalls()
    if chat.tools_problem:
        raise ConfigError(chat.tools_problem)
    if sys.modules.get("torch", chat) is None:
        raise ConfigError(
            "an environment has tools and actor.engine is scripted, whose process imports no torch, which the parsers "
            "of tool calls need: set actor.engine to vllm, or the environment's format to a written one"
        )
    try:
        with warnings.catch_warnings(), uncollected(FINDER):
            warnings.simplefilter("ignore")  # vLLM's own, about torch
            find = import_module(FINDER).find_parser
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "horizonrl":
            raise
        raise MissingDependency(
            f"the parsers of tool calls need {error.name!r}, which is not installed"
        ) from error
    parser: ToolParser = find(chat, name)
    return parser


def divided(text: str) -> tuple[str, str]:
    """Return the thoughts and the rest. A thought that the generation prompt began needs its tag (`chat.thought`)."""
    thoughts, closed, rest = text.partition(THOUGHT)
    if closed:
        return thoughts.strip().removeprefix(THINK).strip(), rest
    # max_tokens cut a thought: what it says is no answer, and a call in it is none.
    return (
        (text.strip().removeprefix(THINK).strip(), "")
        if text.lstrip().startswith(THINK)
        else ("", text)
    )


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """The tags between which a template writes a call; empty if it writes none."""

    first: str = ""
    last: str = ""

    @classmethod
    def of(cls, chat: ChatTemplate) -> "CallSyntax":
        """Read the tags off a call that the template writes."""
        reply = chat.spell(
            chat.encode_reply(ChatMessage("assistant", "", (ToolCall("probe", "{}"),)))
        )
        written = divided(chat.thought + reply)[1]
        first, last = _FIRST_TAG.match(written), _LAST_TAG.search(written)
        return cls(first[1], last[1]) if first and last and first[1] != last[1] else cls()

    def words(self, text: str) -> tuple[str, int]:
        """Return the words around the calls, those after the last one too, and the number of whole calls.

        -1 stands for a call that is not whole.
        """
        around = re.compile(f"{re.escape(self.first)}.*?{re.escape(self.last)}", re.DOTALL)
        words, calls = around.subn("", text)
        return words.strip(), -1 if self.first in words or self.last in words else calls


def whole_or_text(text: str, syntax: CallSyntax, content: str, calls: Sequence[ToolCall]) -> Parsed:
    """Return what a family's parser found (`content`, `calls`), or the text alone if a call is not whole."""
    reasoning, answer = divided(text)
    if syntax.first:
        content, whole = syntax.words(answer)
        if whole != len(calls):
            return Parsed(answer, reasoning)
    if not calls:
        return Parsed(answer, reasoning)
    if not all(call.name and read_object(call.arguments) is not None for call in calls):
        return Parsed(answer, reasoning)
    return Parsed(content, reasoning, tuple(calls))
