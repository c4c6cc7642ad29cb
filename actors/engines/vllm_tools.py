"""Tool calls, read by vLLM's own parsers. Imported only where tools are used, since vLLM's import takes seconds."""

import json
import logging
from dataclasses import dataclass
from typing import Any, cast

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tool_parsers import ToolParserManager

from horizonrl.actors.chat.messages import ChatMessage
from horizonrl.actors.chat.template import ChatTemplate
from horizonrl.actors.chat.tool_calls import CallSyntax, Parsed, ToolParser, divided, whole_or_text
from horizonrl.common.errors import ConfigError, did_you_mean
from horizonrl.envs.api import ToolCall, Tools

FAMILIES = (
    "hermes", "qwen3_xml", "llama3_json", "mistral", "llama4_pythonic", "pythonic", "deepseek_v3", "deepseek_v31",
    "glm45", "glm47", "kimi_k2", "minimax_m2", "seed_oss", "granite", "granite4", "internlm", "jamba", "olmo3",
    "phi4_mini_json", "xlam", "hunyuan_a13b", "ernie45", "step3", "functiongemma", "gemma4", "lfm2", "apertus",
)  # fmt: skip
"""Tried in this order. Several read the same syntax, so the common ones come first."""
PROBES = (
    ChatMessage("assistant", "", (ToolCall("probe", '{"place": "Rome"}'),)),
    ChatMessage(
        "assistant", "Let me see.", (ToolCall("probe", '{"place": "a \\"b\\" é", "days": 2}'),)
    ),
    ChatMessage("assistant", "", (ToolCall("probe", '{"place": "Rome"}'), ToolCall("other", "{}"))),
)
"""What a parser must read as the template writes it. Two calls are asked of templates that write two."""
PROBED: Tools = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    }
    for name in ("probe", "other")
)

# Malformed calls are what an agent in training writes: the parsers log each with a stack trace.
logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)


@dataclass(frozen=True, slots=True)
class VllmParser:
    name: str
    parser: Any
    """A subclass of vLLM's ToolParser; an instance reads one reply."""
    tokenizer: Any
    syntax: CallSyntax

    def parse(self, text: str, tools: Tools) -> Parsed:
        """Return what a reply says. Text that is not made of whole calls stays text."""
        answer = divided(text)[1]
        # Not in the fields: vLLM's protocol is pydantic, and fills each tool in.
        request = ChatCompletionRequest.model_validate(
            {"messages": [], "tools": list(tools), "tool_choice": "auto"}
        )
        try:
            parsed = self.parser(self.tokenizer, request.tools).extract_tool_calls(answer, request)
        except Exception:  # noqa: BLE001 - the boundary to parsers of many hands: what makes one fail is no call
            return whole_or_text(text, CallSyntax(), "", ())
        calls = [
            ToolCall(call.function.name, call.function.arguments) for call in parsed.tool_calls
        ]
        return whole_or_text(text, self.syntax, (parsed.content or "").strip(), calls)


def find_parser(chat: ChatTemplate, name: str | None = None) -> ToolParser:
    """Return the parser of that name, or the first one that reads what the chat template writes. Raises ConfigError."""
    parsers = sorted(ToolParserManager.list_registered())
    if name is not None and name not in parsers:
        raise ConfigError(
            f"vLLM has no tool parser {name!r}{did_you_mean(name, parsers)} Known: {', '.join(parsers)}"
        )
    syntax, tokenizer = CallSyntax.of(chat), cast(Any, chat.tokenizer)
    for family in (
        (name,) if name is not None else (family for family in FAMILIES if family in parsers)
    ):
        try:
            # A family's parser refuses a tokenizer that lacks its tokens.
            made = ToolParserManager.get_tool_parser(family)
            made(tokenizer)
        except Exception:  # noqa: BLE001 - the boundary to parsers of many hands
            continue
        parser = VllmParser(family, made, tokenizer, syntax)
        if reads(parser, chat):
            return parser
    wanted = (
        f"vLLM's tool parser {name!r} does not read"
        if name is not None
        else "none of vLLM's tool parsers reads"
    )
    raise ConfigError(
        f"{wanted} the calls that this chat template writes: use another action format"
    )


def reads(parser: ToolParser, chat: ChatTemplate) -> bool:
    """Return whether a parser finds the calls in what the template makes of them, and their words."""
    return all(_reads(parser, chat, probe) for probe in PROBES)


def _reads(parser: ToolParser, chat: ChatTemplate, probe: ChatMessage) -> bool:
    try:
        ids = chat.encode_reply(probe)
    except ConfigError:
        return len(probe.calls) > 1  # a template of one call a turn
    written = chat.spell(ids)
    result = parser.parse(chat.thought + written, PROBED)
    named = [(call.name, json.loads(call.arguments)) for call in result.calls]
    # Some templates leave out words beside calls.
    words = probe.content if probe.content in written else ""
    return result.content == words and named == [
        (call.name, json.loads(call.arguments)) for call in probe.calls
    ]
