"""A call and its answer, whatever API it came by; and how a call is refused."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from horizonrl.actors.chat.messages import ChatMessage, ToolCall, Tools
from horizonrl.actors.gateway.matching import spelled

CALLS_LEFT_HEADER = "x-horizonrl-calls-left"
"""Model calls that the episode's horizon leaves after this one. 0 marks the last one."""
IGNORED_HEADER = "x-horizonrl-ignored"
"""Parameters of the request that had no effect, separated by commas."""
TRAIN_HEADER = "x-train"
"""A program sends 0 to keep a call out of the loss."""
RETRY_HEADER = "x-stainless-retry-count"
"""The clients of OpenAI and Anthropic number their retries in it."""

SERVED = (
    *(
        "model",
        "messages",
        "input",
        "previous_response_id",
        "instructions",
        "tools",
        "tool_choice",
        "stop",
    ),
    *("stream", "logprobs", "n"),
)
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
LABELS = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
ACCEPTED = frozenset((*SERVED, *LIMITS, *LABELS, "stream_options", "include"))
"""Parameters that are served, or that change nothing of what is sampled. Any other one is ignored, and said so."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "response_format": (None, {"type": "text"}),
    "text": (None, {"format": {"type": "text"}}, {}),
    "top_logprobs": (None, 0),
    "parallel_tool_calls": (None, True),
    "truncation": (None, "disabled"),
    "modalities": (None, ["text"]),
    "thinking": (None, {"type": "disabled"}),
}
"""Values with which a parameter asks for what happens anyway."""


class CallRefused(Exception):
    """An answer with an HTTP status and a code that a program can read (docs/bring-your-own-agent.md)."""

    def __init__(self, status: int, code: str, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.parameter = status, code, parameter

    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": str(self),
                "type": kind,
                "param": self.parameter,
                "code": self.code,
            }
        }


def episode_over() -> CallRefused:
    """Return the refusal of a call under the key of an episode that has ended."""
    return CallRefused(409, "episode_over", "the episode has ended: its key is not valid any more")


def invalid_request(message: str, parameter: str | None = None) -> CallRefused:
    """Return the refusal of a body that has another form than its API says."""
    return CallRefused(400, "invalid_request", message, parameter)


@dataclass(frozen=True, slots=True)
class CallRequest:
    """What a program asks for."""

    messages: tuple[ChatMessage, ...]
    tools: Tools = ()
    may_call: bool = True
    """False for `tool_choice = "none"`: the reply stays text."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    ignored: tuple[str, ...] = ()
    """Names of parameters that have no effect."""
    instructed: bool = False
    """Whether the first message is a Responses request's `instructions`, which no later request inherits."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    text: str
    logprob: float


@dataclass(frozen=True, slots=True)
class Answer:
    """What a program gets to read."""

    content: str
    reasoning: str
    calls: tuple[ToolCall, ...]
    finish: Literal["stop", "length", "tool_calls"]
    stopped_by: str | None
    """The stop string that ended the text."""
    prompt_tokens: int
    reply_tokens: int
    tokens: tuple[SampledToken, ...]
    """Empty unless the request asks for logprobs."""
    calls_left: int
    ignored: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PastReply:
    """A reply of this episode, with what it answers: later requests may name it."""

    request: CallRequest
    answer: Answer

    def message(self) -> ChatMessage:
        answer = self.answer
        return ChatMessage("assistant", answer.content, answer.calls, answer.reasoning)


Replies = Mapping[str, PastReply]
"""By name, which is a part of every id that a reply has: `call_NAME_0`, `msg_NAME`, `resp_NAME`."""
NO_REPLIES: Replies = MappingProxyType({})


def reply_name(item_id: str) -> str:
    """Return the name of the reply to which an id belongs, if it is one of the gateway's."""
    return (*item_id.split("_"), "")[1]


def with_words(reply: ChatMessage, call_ids: Sequence[str], replies: Replies) -> ChatMessage:
    """Return a reply with the words beside its calls, if a client that left them out repeats the calls and their ids.

    The ids tell which reply it is, so it is continued as one whose thoughts were left out is.
    """
    names = set(map(reply_name, call_ids))
    past = replies.get(names.pop()) if len(names) == 1 else None
    if past is None or reply.content or spelled(reply.calls) != spelled(past.answer.calls):
        return reply
    return replace(reply, content=past.answer.content)


def ignored_parameters(body: dict[str, Any], messages: Sequence[ChatMessage]) -> tuple[str, ...]:
    """Return the names of what has no effect here: of a request's parameters, and of parts of them.

    Sampling is the ticket's, and nothing may constrain the behaviour policy that the learner's does not know of.
    """
    ignored = [
        name for name, value in body.items() if value is not None and _has_no_effect(name, value)
    ]
    if isinstance(choice := body.get("tool_choice"), dict) or choice == "required":
        ignored.append("tool_choice")
    ignored += {f"tools.{tool['type']}" for tool in body.get("tools") or () if _is_hosted(tool)}
    if messages[-1].role == "assistant":  # the policy begins a reply, and goes on with none
        ignored.append("prefill")
    return tuple(sorted(ignored))


def _has_no_effect(name: str, value: Any) -> bool:
    return value not in NEUTRAL[name] if name in NEUTRAL else name not in ACCEPTED


def make_tools(tools: Any, nested: bool) -> Tools:
    """Return declared functions in Chat Completions' form; `nested` tells it from that of Responses.

    Tools of other types, which a provider would run or read in a way of its own, are left out.
    """
    if tools is None:
        return ()
    if not isinstance(tools, list):
        raise invalid_request("tools is no list", "tools")
    return tuple(_tool(tool, nested) for tool in tools if not _is_hosted(tool))


def _is_hosted(tool: Any) -> bool:
    kind = tool.get("type") if isinstance(tool, dict) else None
    return isinstance(kind, str) and kind != "function"


def _tool(tool: Any, nested: bool) -> dict[str, Any]:
    function = tool.get("function") if nested and isinstance(tool, dict) else tool
    if (
        not isinstance(tool, dict)
        or tool.get("type") != "function"
        or not isinstance(function, dict)
    ):
        form = (
            '{"type": "function", "function": {"name": ...}}'
            if nested
            else '{"type": "function", "name": ...}'
        )
        raise invalid_request(f"a tool has the form {form}, not {tool!r:.100}", "tools")
    if not isinstance(function.get("name"), str) or not isinstance(
        function.get("parameters") or {}, dict
    ):
        raise invalid_request("a tool's function has a name and a schema of parameters", "tools")
    if not isinstance(function.get("description") or "", str):
        raise invalid_request(f"the description of {function['name']!r:.100} is no text", "tools")
    described = {
        "name": function["name"],
        "description": function.get("description") or "",
        "parameters": function.get("parameters") or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": described}


def read_text(content: Any) -> str:
    """Return a message's content as one text. Raises CallRefused for anything but text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return clean(content)
    if isinstance(content, list):
        return "\n".join(map(_part, content))
    raise CallRefused(
        400, "unsupported_content", f"a content is a text or a list of texts, not {content!r:.100}"
    )


def _part(part: Any) -> str:
    text = (
        part
        if isinstance(part, str)
        else part.get("text", part.get("refusal"))
        if isinstance(part, dict)
        else None
    )
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        raise CallRefused(400, "unsupported_content", f"only text is read, not {kind!r}")
    return clean(text)


def clean(text: str) -> str:
    """Return a text with `?` for each half of a character, which no tokenizer takes."""
    return text.encode("utf-8", "replace").decode()


def in_order_of_calls(
    call_ids: Sequence[str], results: Sequence[tuple[str, ChatMessage]]
) -> list[ChatMessage]:
    """Return tool messages in the order of the calls that they answer, if these are known."""
    index_by_id = {call_id: index for index, call_id in enumerate(call_ids)}
    if all(call_id in index_by_id for call_id, _ in results):
        results = sorted(results, key=lambda result: index_by_id[result[0]])
    return [message for _, message in results]
