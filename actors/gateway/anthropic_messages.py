"""Anthropic's Messages: a body is read as the Chat Completions body that means the same."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from horizonrl.actors.gateway import chat_completions
from horizonrl.actors.gateway.calls import (
    NO_REPLIES,
    Answer,
    CallRefused,
    CallRequest,
    Replies,
    clean,
    invalid_request,
    reply_name,
)
from horizonrl.actors.gateway.chat_completions import marks, sse
from horizonrl.common.texts import read_object

PATH = "messages"
TRANSLATED = ("messages", "system", "tools", "tool_choice", "stop_sequences")
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
BILLING = "x-anthropic-billing-header"
"""Claude Code begins its system prompt with it. It differs between requests, so no call would continue another."""
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
ERROR_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def parse_messages_request(body: dict[str, Any], replies: Replies = NO_REPLIES) -> CallRequest:
    """Return the call that a body asks for. Raises CallRefused."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise invalid_request("messages is a list of at least one message", "messages")
    chat: list[dict[str, Any]] = []
    if body.get("system"):
        chat.append({"role": "system", "content": _system(body["system"])})
    for message in messages:
        chat += _messages(message, replies)
    translated = {name: value for name, value in body.items() if name not in TRANSLATED}
    translated |= {
        "messages": chat,
        "tools": _tools(body.get("tools")),
        "stop": body.get("stop_sequences"),
    }
    return chat_completions.parse(translated | _tool_choice(body.get("tool_choice")), replies)


def _system(system: Any) -> Any:
    if not isinstance(system, list):
        return system
    return [
        block
        for block in system
        if not (isinstance(block, dict) and str(block.get("text")).startswith(BILLING))
    ]


def _messages(message: Any, replies: Replies) -> Iterator[dict[str, Any]]:
    """Yield a message as Chat Completions has it: results of tools are messages of their own there."""
    if not isinstance(message, dict):
        raise invalid_request(f"a message is an object, not {message!r:.100}", "messages")
    content = message.get("content")
    if not isinstance(content, list):
        yield {"role": message.get("role"), "content": content}
        return
    blocks = [block if isinstance(block, dict) else {"text": block} for block in content]
    if message.get("role") == "assistant":
        yield _reply(blocks, replies)
        return
    words = []
    for block in blocks:
        if block.get("type") == "tool_result":
            yield {
                "role": "tool",
                "tool_call_id": block.get("tool_use_id"),
                "content": block.get("content") or "",
            }
        else:
            words.append(block)
    if words:
        yield {"role": message.get("role"), "content": words}


def _reply(blocks: list[dict[str, Any]], replies: Replies) -> dict[str, Any]:
    by_type: dict[str, list[dict[str, Any]]] = {}
    for block in blocks:
        by_type.setdefault(str(block.get("type", "text")), []).append(block)
    by_type.pop("redacted_thinking", None)
    calls, thoughts = by_type.pop("tool_use", []), by_type.pop("thinking", [])
    return {
        "role": "assistant",
        "content": [block for blocks in by_type.values() for block in blocks],
        "reasoning_content": "\n".join(str(thought.get("thinking")) for thought in thoughts),
        "tool_calls": [_call(block, replies) for block in calls],
    }


def _call(block: Mapping[str, Any], replies: Replies) -> dict[str, Any]:
    """Return a call in the spelling that was sampled, if the block is one that this episode was given."""
    call_id, arguments = str(block.get("id")), block.get("input")
    name = reply_name(call_id)
    past = replies.get(name)
    for index, call in enumerate(past.answer.calls if past else ()):
        if call_id == _call_id(name, index) and arguments == _input(call.arguments):
            arguments = call.arguments
    return {"id": call_id, "function": {"name": block.get("name"), "arguments": arguments}}


def _tools(tools: Any) -> Any:
    if not isinstance(tools, list):
        return tools
    return [_tool(tool) for tool in tools]


def _tool(tool: Any) -> Any:
    if not isinstance(tool, dict) or tool.get("type") not in (None, "custom"):
        return tool
    function = {name: tool.get(name) for name in ("name", "description")}
    return {"type": "function", "function": function | {"parameters": tool.get("input_schema")}}


def _tool_choice(choice: Any) -> dict[str, Any]:
    if choice is None:
        return {}
    if not isinstance(choice, dict):
        raise invalid_request(f"tool_choice is an object, not {choice!r:.100}", "tool_choice")
    parallel = not choice.get("disable_parallel_tool_use")
    return {
        "tool_choice": CHOICES.get(str(choice.get("type")), choice),
        "parallel_tool_calls": parallel,
    }


def write_message(answer: Answer, reply_id: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a `message`."""
    return {
        "id": f"msg_{reply_id}",
        "type": "message",
        "role": "assistant",
        "model": str(body.get("model") or "policy"),
        "content": _content(answer, reply_id),
        "stop_reason": "stop_sequence" if answer.stopped_by else STOP_REASONS[answer.finish],
        "stop_sequence": answer.stopped_by,
        "usage": {"input_tokens": answer.prompt_tokens, "output_tokens": answer.reply_tokens},
        "horizonrl": marks(answer),
    }


def write_message_events(answer: Answer, reply_id: str, body: Mapping[str, Any]) -> Iterator[str]:
    """Yield the events of a stream: each block begins, comes in one piece, and ends."""

    def event(kind: str, **fields: Any) -> str:
        return sse({"type": kind, **fields}, kind)

    whole = write_message(answer, reply_id, body)
    usage = whole["usage"]
    unfinished: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
    begun = whole | unfinished | {"usage": usage | {"output_tokens": 0}}
    yield event("message_start", message=begun)
    for index, block in enumerate(whole["content"]):
        empty: dict[str, Any]
        match block["type"]:
            case "text":
                empty, delta = {"text": ""}, {"type": "text_delta", "text": block["text"]}
            case "thinking":
                thought = block["thinking"]
                empty, delta = {"thinking": ""}, {"type": "thinking_delta", "thinking": thought}
            case _:
                arguments = json.dumps(block["input"])
                empty = {"input": {}}
                delta = {"type": "input_json_delta", "partial_json": arguments}
        yield event("content_block_start", index=index, content_block=block | empty)
        yield event("content_block_delta", index=index, delta=delta)
        yield event("content_block_stop", index=index)
    ended = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
    yield event("message_delta", delta=ended, usage=usage, horizonrl=whole["horizonrl"])
    yield event("message_stop")


def write_refusal(refused: CallRefused) -> dict[str, Any]:
    """Return an `error`, in the words by which clients know that they have to shorten the conversation."""
    ordinary = "api_error" if refused.status >= 500 else "invalid_request_error"
    message = str(refused)
    if refused.code == "context_length_exceeded":
        message = f"prompt is too long: {message}"
    error = {"type": ERROR_TYPES.get(refused.status, ordinary), "message": message}
    return {"type": "error", "error": error | {"code": refused.code}}


def _content(answer: Answer, reply_id: str) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if answer.reasoning:
        blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
    if answer.content or not answer.calls:
        blocks.append({"type": "text", "text": answer.content})
    for index, call in enumerate(answer.calls):
        block = {"type": "tool_use", "id": _call_id(reply_id, index), "name": call.name}
        blocks.append(block | {"input": _input(call.arguments)})
    return blocks


def _call_id(reply_id: str, index: int) -> str:
    return f"toolu_{reply_id}_{index}"


def _input(arguments: str) -> dict[str, Any]:
    """Return a call's arguments as the object that a client of this API expects, whatever was sampled."""
    made = read_object(arguments or "{}")
    return {"arguments": clean(arguments)} if made is None else made
