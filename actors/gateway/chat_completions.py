"""OpenAI's Chat Completions: from a body to a call, and from an answer to a reply or its events."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from horizonrl.actors.chat.messages import ChatMessage, ToolCall
from horizonrl.actors.gateway.calls import (
    NO_REPLIES,
    Answer,
    CallRefused,
    CallRequest,
    Replies,
    clean,
    ignored_parameters,
    in_order_of_calls,
    invalid_request,
    make_tools,
    read_text,
    with_words,
)

PATH = "chat/completions"
REFUSED = (
    "functions",
    "function_call",
    "audio",
    "prediction",
    "web_search_options",
    "best_of",
    "echo",
)
"""Parameters without which a request would mean something else."""
MOST_STOPS = 16
REASONING = ("reasoning_content", "reasoning")


def parse(body: dict[str, Any], replies: Replies = NO_REPLIES) -> CallRequest:
    """Return the call that a body asks for. Raises CallRefused."""
    for name in REFUSED:
        if body.get(name):
            raise CallRefused(400, "unsupported_parameter", f"{name} is not served", name)
    if body.get("n") not in (None, 1):
        raise CallRefused(
            400, "unsupported_parameter", f"n is {body['n']!r}: one reply is sampled per call", "n"
        )
    messages = conversation(body.get("messages"), replies)
    return CallRequest(
        messages=messages,
        tools=make_tools(body.get("tools"), nested=True),
        may_call=body.get("tool_choice") != "none",
        max_tokens=read_limit(body, "max_completion_tokens", "max_tokens"),
        stop=_stops(body.get("stop")),
        logprobs=bool(body.get("logprobs")),
        ignored=ignored_parameters(body, messages)
        + ("messages.name",) * _names_speakers(body["messages"]),
    )


def read_limit(body: Mapping[str, Any], *names: str) -> int | None:
    """Return the first limit that a body has."""
    for name in names:
        value = body.get(name)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise invalid_request(f"{name} is {value!r}: it is a number of tokens", name)
            return value
    return None


def _stops(value: Any) -> tuple[str, ...]:
    stops = (
        (value,)
        if isinstance(value, str)
        else tuple(value or ())
        if isinstance(value, list | None)
        else None
    )
    if (
        stops is None
        or len(stops) > MOST_STOPS
        or not all(isinstance(stop, str) and stop for stop in stops)
    ):
        raise invalid_request(f"stop is a text or a list of up to {MOST_STOPS}", "stop")
    return stops


def conversation(value: Any, replies: Replies) -> tuple[ChatMessage, ...]:
    """Return a body's messages, tool results in the order of the calls that they answer."""
    if not isinstance(value, list) or not value:
        raise invalid_request("messages is a list of at least one message", "messages")
    messages: list[ChatMessage] = []
    results: list[tuple[str, ChatMessage]] = []
    call_ids: Sequence[str] = ()
    for one in value:
        if not isinstance(one, dict):
            raise invalid_request(f"a message is an object, not {one!r:.100}", "messages")
        role = one.get("role")
        if role != "assistant" and one.get("content") is None:
            raise invalid_request(f"a message of role {role!r:.100} has no content", "messages")
        if role == "tool":
            results.append(
                (str(one.get("tool_call_id")), ChatMessage("tool", read_text(one.get("content"))))
            )
            continue
        messages += in_order_of_calls(call_ids, results)
        results = []
        if role == "assistant":
            calls = one.get("tool_calls") or []
            if not isinstance(calls, list):
                raise invalid_request(f"tool_calls is a list, not {calls!r:.100}", "messages")
            call_ids = [str(call.get("id")) for call in calls if isinstance(call, dict)]
            messages.append(with_words(_reply(one, calls), call_ids, replies))
        elif role in ("system", "developer"):
            messages.append(ChatMessage("system", read_text(one.get("content"))))
        elif role == "user":
            messages.append(ChatMessage("user", read_text(one.get("content"))))
        else:
            raise invalid_request(f"no message has the role {role!r:.100}", "messages")
    return (*messages, *in_order_of_calls(call_ids, results))


def _names_speakers(messages: list[dict[str, Any]]) -> bool:
    # Templates have no place for them. A result's name is that of its call, which is known.
    return any(one.get("name") for one in messages if one["role"] != "tool")


def _reply(one: Mapping[str, Any], calls: list[Any]) -> ChatMessage:
    if one.get("function_call"):
        raise CallRefused(
            400, "unsupported_parameter", "function_call is not served: use tool_calls", "messages"
        )
    reasoning = next((one[name] for name in REASONING if isinstance(one.get(name), str)), "")
    return ChatMessage(
        "assistant", read_text(one.get("content")), tuple(map(_call, calls)), clean(reasoning)
    )


def _call(call: Any) -> ToolCall:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid_request(f"a tool call has a function with a name, not {call!r:.100}")
    arguments = function.get("arguments") or ""
    return ToolCall(
        clean(function["name"]),
        clean(arguments if isinstance(arguments, str) else json.dumps(arguments)),
    )


def write_reply(answer: Answer, reply_id: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a `chat.completion`."""
    message: dict[str, Any] = {
        "role": "assistant",
        "content": answer.content or None,
        "refusal": None,
    }
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = _write_calls(answer, reply_id)
    elif not answer.content:
        message["content"] = ""
    choice = {
        "index": 0,
        "message": message,
        "logprobs": _logprobs(answer, body),
        "finish_reason": answer.finish,
    }
    return _envelope(reply_id, body, "chat.completion") | {
        "choices": [choice],
        "usage": usage(answer),
        "horizonrl": marks(answer),
    }


def write_events(answer: Answer, reply_id: str, body: Mapping[str, Any]) -> Iterator[str]:
    """Yield the events of a stream: the whole reply in one chunk for each of its parts."""
    envelope = _envelope(reply_id, body, "chat.completion.chunk")

    def chunk(delta: Mapping[str, Any], finish: str | None = None, **more: Any) -> str:
        choice = {
            "index": 0,
            "delta": delta,
            "logprobs": more.pop("logprobs", None),
            "finish_reason": finish,
        }
        return sse(envelope | {"choices": [choice]} | more)

    yield chunk({"role": "assistant", "content": ""})
    if answer.reasoning:
        yield chunk({"reasoning_content": answer.reasoning})
    if answer.content:
        yield chunk({"content": answer.content}, logprobs=_logprobs(answer, body))
    for index, call in enumerate(_write_calls(answer, reply_id)):
        yield chunk({"tool_calls": [{"index": index, **call}]})
    yield chunk({}, answer.finish, horizonrl=marks(answer))
    if (body.get("stream_options") or {}).get("include_usage"):
        yield sse(envelope | {"choices": [], "usage": usage(answer)})
    yield "data: [DONE]\n\n"


def sse(event: Mapping[str, Any], name: str | None = None) -> str:
    """Return a server-sent event."""
    return f"{f'event: {name}' + chr(10) if name else ''}data: {json.dumps(event)}\n\n"


def marks(answer: Answer) -> dict[str, Any]:
    """Return what only this endpoint says: whether this was the last call, and what had no effect."""
    return {
        "calls_left": answer.calls_left,
        "last_call": answer.calls_left == 0,
        "ignored": list(answer.ignored),
    }


def usage(answer: Answer) -> dict[str, int]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.reply_tokens,
        "total_tokens": answer.prompt_tokens + answer.reply_tokens,
    }


def _envelope(reply_id: str, body: Mapping[str, Any], kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{reply_id}",
        "object": kind,
        "created": int(time.time()),
        "model": str(body.get("model") or "policy"),
    }


def _write_calls(answer: Answer, reply_id: str) -> list[dict[str, Any]]:
    return [
        {
            "id": f"call_{reply_id}_{index}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for index, call in enumerate(answer.calls)
    ]


def _logprobs(answer: Answer, body: Mapping[str, Any]) -> dict[str, Any] | None:
    if not body.get("logprobs"):
        return None
    content = [
        {
            "token": token.text,
            "logprob": token.logprob,
            "bytes": list(token.text.encode("utf-8", "replace")),
            "top_logprobs": [],
        }
        for token in answer.tokens
    ]
    return {"content": content, "refusal": None}
