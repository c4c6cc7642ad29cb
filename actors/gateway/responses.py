"""OpenAI's Responses API, as far as agents need it. What the episode's replies hold can be named instead of sent."""

import time
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

from horizonrl.actors.chat.messages import ChatMessage, ToolCall
from horizonrl.actors.gateway.calls import (
    NO_REPLIES,
    Answer,
    CallRefused,
    CallRequest,
    PastReply,
    Replies,
    clean,
    ignored_parameters,
    in_order_of_calls,
    invalid_request,
    make_tools,
    read_text,
    reply_name,
    with_words,
)
from horizonrl.actors.gateway.chat_completions import marks, read_limit, sse

PATH = "responses"
REFUSED = ("conversation", "prompt", "background")
"""Parameters that name something stored, or ask for it."""


def parse_response_request(body: dict[str, Any], replies: Replies = NO_REPLIES) -> CallRequest:
    """Return the call that a body asks for. Raises CallRefused."""
    for name in REFUSED:
        if body.get(name):
            raise CallRefused(
                400, "unsupported_parameter", f"{name} is not served: send the whole input", name
            )
    input = body.get("input")
    items = [{"role": "user", "content": input}] if isinstance(input, str) else input
    if not isinstance(items, list) or not items:
        raise invalid_request("input is a text or a list of items", "input")
    instructions = body.get("instructions")
    if not isinstance(instructions, str | None):
        raise invalid_request("instructions is a text", "instructions")
    system = [ChatMessage("system", read_text(instructions))] if instructions else []
    conversation = _Items(replies)
    if body.get("previous_response_id") is not None:
        conversation.go_on_from(str(body["previous_response_id"]))
    messages = (*system, *conversation.of(items))
    return CallRequest(
        messages=messages,
        tools=make_tools(body.get("tools"), nested=False),
        may_call=body.get("tool_choice") != "none",
        max_tokens=read_limit(body, "max_output_tokens"),
        ignored=ignored_parameters(body, messages),
        instructed=bool(system),
    )


class _Items:
    """Joins items into messages: reasoning, text and calls of one reply are several items."""

    def __init__(self, replies: Replies) -> None:
        self._replies = replies
        self._messages: list[ChatMessage] = []
        self._reply: ChatMessage | None = None
        self._call_ids: list[str] = []
        self._results: list[tuple[str, ChatMessage]] = []

    def go_on_from(self, response_id: str) -> None:
        """Begin with the conversation that ends with a response of this episode."""
        name = reply_name(response_id)
        past = self._replies.get(name)
        if past is None or response_id != f"resp_{name}":
            raise invalid_request(
                f"no response of this episode is {response_id!r:.100}: send the whole input",
                "previous_response_id",
            )
        self._messages += past.request.messages[past.request.instructed :]
        self._reply = past.message()
        self._call_ids = [_call_id(name, index) for index in range(len(past.answer.calls))]

    def of(self, items: list[Any]) -> tuple[ChatMessage, ...]:
        for item in items:
            if not isinstance(item, dict):
                raise invalid_request(f"an item is an object, not {item!r:.100}", "input")
            self._add(item)
        self._flush()
        return tuple(self._messages)

    def _add(self, item: Mapping[str, Any]) -> None:
        match item.get("type", "message"):
            case "message" if item.get("role") == "assistant":
                # A second text begins a second reply; a text after reasoning belongs to it.
                if self._results or (
                    self._reply is not None and (self._reply.content or self._reply.calls)
                ):
                    self._flush()
                self._extend(content=read_text(item.get("content")))
            case "message":
                self._flush()
                role = "user" if item.get("role") == "user" else "system"
                if item.get("role") not in ("user", "system", "developer"):
                    raise invalid_request(
                        f"no item has the role {item.get('role')!r:.100}", "input"
                    )
                self._messages.append(ChatMessage(role, read_text(item.get("content"))))  # type: ignore[arg-type]
            case "reasoning":
                self._flush()
                self._extend(reasoning=read_text(item.get("content") or item.get("summary")))
            case "function_call":
                call_id = str(item.get("call_id"))
                if self._results and not self._same_reply(call_id):
                    self._flush()
                self._call_ids.append(call_id)
                call = ToolCall(
                    clean(str(item.get("name"))), clean(str(item.get("arguments") or ""))
                )
                self._extend(call=call)
            case "function_call_output":
                self._results.append(
                    (str(item.get("call_id")), ChatMessage("tool", read_text(item.get("output"))))
                )
            case "item_reference":
                self._add(self._find_item(str(item.get("id"))))
            case kind:
                raise CallRefused(
                    400, "unsupported_content", f"an item {kind!r:.100} is not read", "input"
                )

    def _find_item(self, item_id: str) -> Mapping[str, Any]:
        """Return the item of an earlier reply that has this id."""
        name = reply_name(item_id)
        past: PastReply | None = self._replies.get(name)
        for item in _output(past.answer, name) if past else ():
            if item["id"] == item_id:
                return item
        message = f"no reply of this episode has the item {item_id!r:.100}: send the item itself"
        raise invalid_request(message, "input")

    def _same_reply(self, call_id: str) -> bool:
        """Return whether a call belongs to the reply of the call before it, whose result stands between them."""
        name = reply_name(call_id)
        return name in self._replies and [name] == [*map(reply_name, self._call_ids[-1:])]

    def _extend(self, content: str = "", reasoning: str = "", call: ToolCall | None = None) -> None:
        reply = self._reply or ChatMessage("assistant")
        calls = reply.calls if call is None else (*reply.calls, call)
        self._reply = ChatMessage(
            "assistant", content or reply.content, calls, reasoning or reply.reasoning
        )

    def _flush(self) -> None:
        """End the reply and its results."""
        if self._reply is not None:
            self._messages.append(with_words(self._reply, self._call_ids, self._replies))
        self._messages += in_order_of_calls(self._call_ids, self._results)
        self._reply, self._call_ids, self._results = None, [], []


def write_response(answer: Answer, reply_id: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a `response`."""
    tokens = answer.reply_tokens
    cut = answer.finish == "length"
    return _response_envelope(reply_id, body) | {
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": _output(answer, reply_id),
        "usage": {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt_tokens + tokens,
        },
        "horizonrl": marks(answer),
    }


def write_response_events(answer: Answer, reply_id: str, body: Mapping[str, Any]) -> Iterator[str]:
    """Yield the events of a stream: each item is added, filled and done."""
    numbers = count()

    def event(kind: str, **fields: Any) -> str:
        return sse({"type": kind, "sequence_number": next(numbers), **fields}, kind)

    begun = _response_envelope(reply_id, body) | {
        "status": "in_progress",
        "output": [],
        "usage": None,
    }
    yield event("response.created", response=begun)
    yield event("response.in_progress", response=begun)
    whole = write_response(answer, reply_id, body)
    for index, item in enumerate(whole["output"]):
        where = {"item_id": item["id"], "output_index": index}
        empty = item | {"status": "in_progress"} | {key: [] for key in ("content",) if key in item}
        yield event("response.output_item.added", output_index=index, item=empty)
        if item["type"] == "message":
            part = item["content"][0]
            blank = part | {"text": ""}
            yield event("response.content_part.added", **where, content_index=0, part=blank)
            yield event(
                "response.output_text.delta",
                **where,
                content_index=0,
                delta=part["text"],
                logprobs=[],
            )
            yield event(
                "response.output_text.done",
                **where,
                content_index=0,
                text=part["text"],
                logprobs=[],
            )
            yield event("response.content_part.done", **where, content_index=0, part=part)
        elif item["type"] == "function_call":
            arguments = item["arguments"]
            yield event("response.function_call_arguments.delta", **where, delta=arguments)
            yield event(
                "response.function_call_arguments.done",
                **where,
                name=item["name"],
                arguments=arguments,
            )
        yield event("response.output_item.done", output_index=index, item=item)
    yield event(
        "response.incomplete" if whole["status"] == "incomplete" else "response.completed",
        response=whole,
    )


def _response_envelope(reply_id: str, body: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": f"resp_{reply_id}",
        "object": "response",
        "created_at": int(time.time()),
        "model": str(body.get("model") or "policy"),
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "metadata": body.get("metadata") or {},
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_p": None,
    }


def _call_id(reply_id: str, index: int) -> str:
    return f"call_{reply_id}_{index}"


def _output(answer: Answer, reply_id: str) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if answer.reasoning:
        thought = [{"type": "reasoning_text", "text": answer.reasoning}]
        items.append(
            {"type": "reasoning", "id": f"rs_{reply_id}", "summary": [], "content": thought}
        )
    if answer.content or not answer.calls:
        text = {"type": "output_text", "text": answer.content, "annotations": [], "logprobs": []}
        items.append(
            {
                "type": "message",
                "id": f"msg_{reply_id}",
                "role": "assistant",
                "status": "completed",
                "content": [text],
            }
        )
    items += [
        {
            "type": "function_call",
            "id": f"fc_{reply_id}_{index}",
            "call_id": _call_id(reply_id, index),
            "name": call.name,
            "arguments": call.arguments,
            "status": "completed",
        }
        for index, call in enumerate(answer.calls)
    ]
    return items
