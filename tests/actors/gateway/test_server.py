"""The gateway as clients see it: OpenAI's own client over HTTP, and raw requests for what it would not send."""

import asyncio
import io
import json
import threading
from typing import Any

import pytest
from aiohttp import ClientSession
from openai import AsyncOpenAI, AuthenticationError, BadRequestError, ConflictError, NotFoundError
from structlog.testing import capture_logs

from horizonrl.actors.chat.template import ChatTemplate
from horizonrl.actors.gateway import matching, server
from horizonrl.actors.gateway.server import Gateway
from horizonrl.actors.gateway.session import Session
from horizonrl.common.errors import ConfigError
from horizonrl.common.types import PolicyVersion, StopReason
from tests.actors.gateway.served import (
    CHAT,
    HELLO,
    TOOL,
    JsonCalls,
    Remembering,
    assert_trained_is_sampled,
    client,
    client_of,
    gateway_of,
    run,
    session_of,
    ticket,
)
from tests.templates import THINKING, tool_tokenizer

NESTED = json.loads('{"items":' * 400 + "{}" + "}" * 400)
CALLING = 'sure\n<tool_call>\n{"name": "go", "arguments": {"to": "north"}}\n</tool_call>'


async def test_a_conversation_is_one_branch_whose_ids_are_those_that_were_sampled() -> None:
    policy = Remembering(lambda read: "ok")
    async with client(policy) as (openai, session):
        messages = list(HELLO)
        for left in (7, 6, 5):
            raw = await openai.chat.completions.with_raw_response.create(
                model="any", messages=messages
            )
            reply = raw.parse()
            assert raw.headers["x-horizonrl-calls-left"] == str(left)
            choice = reply.choices[0]
            assert (choice.message.content, choice.finish_reason) == ("ok", "stop")
            messages += [
                choice.message.model_dump(exclude_none=True),
                {"role": "user", "content": "on"},
            ]
    episode = session.graph.episode(0, StopReason.TERMINATED)
    assert (episode.branches, len(episode.turns)) == ((), 3)
    assert_trained_is_sampled(episode, policy)
    assert CHAT.decode(episode.prompt_ids) == "user\nhello\nassistant\n"


async def test_tool_calls_are_served_and_their_results_continue_the_branch() -> None:
    policy = Remembering(lambda read: CALLING if "result" not in read else "done")
    async with client(policy) as (openai, session):
        tools: Any = [TOOL]
        first = await openai.chat.completions.create(model="m", messages=HELLO, tools=tools)
        message = first.choices[0].message
        assert first.choices[0].finish_reason == "tool_calls"
        assert message.content == "sure"
        assert message.tool_calls is not None
        call: Any = message.tool_calls[0]
        assert (call.function.name, json.loads(call.function.arguments)) == (
            "go",
            {"to": "north"},
        )
        result: Any = {"role": "tool", "tool_call_id": call.id, "content": "result <|im_end|>"}
        messages: Any = [*HELLO, message.model_dump(exclude_none=True), result]
        last = await openai.chat.completions.create(model="m", messages=messages, tools=tools)
        assert last.choices[0].message.content == "done"
    episode = session.graph.episode(0, StopReason.TERMINATED)
    assert episode.branches == ()
    assert_trained_is_sampled(episode, policy)
    special = CHAT.end_of_turn
    assert episode.turns[0].observation_ids.count(special or -1) == 1, "a result cannot end a turn"


async def test_results_are_rendered_in_the_order_of_the_calls_that_they_answer() -> None:
    two = CALLING + CALLING.removeprefix("sure").replace("north", "south")
    policy = Remembering(lambda read: two if "[b]" not in read else "done")
    async with client(policy) as (openai, session):
        tools: Any = [TOOL]
        first = await openai.chat.completions.create(model="m", messages=HELLO, tools=tools)
        message = first.choices[0].message
        assert message.tool_calls is not None
        a, b = (call.id for call in message.tool_calls)
        results = [
            {"role": "tool", "tool_call_id": i, "content": t} for i, t in ((b, "[b]"), (a, "[a]"))
        ]
        messages: Any = [*HELLO, message.model_dump(exclude_none=True), *results]
        await openai.chat.completions.create(model="m", messages=messages, tools=tools)
    read = CHAT.decode(session.graph.episode(0, StopReason.TERMINATED).turns[0].observation_ids)
    assert read.index("[a]") < read.index("[b]")


@pytest.mark.parametrize("tools", [(), (TOOL,)])
async def test_a_thought_that_the_prompt_began_and_the_limit_cut_is_no_answer(tools: Any) -> None:
    chat, policy = (
        ChatTemplate(tool_tokenizer(THINKING)),
        Remembering(lambda read: "I go on and on" * 9),
    )
    async with (
        Gateway(policy, chat, JsonCalls()).open() as gateway,
        gateway.session(ticket(max_turn_tokens=8), 0) as session,
        client_of(gateway, session) as openai,
    ):
        reply = await openai.chat.completions.create(model="m", messages=HELLO, tools=[*tools])
    choice: Any = reply.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("", "length")
    assert choice.message.reasoning_content.startswith("I go")


@pytest.mark.parametrize("usage", [True, False])
async def test_a_stream_has_the_whole_reply_and_its_end(
    usage: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "KEEP_ALIVE_S", 0.01)

    policy = Remembering(lambda read: CALLING, token_s=0.002)
    async with client(policy) as (openai, session):
        tools: Any = [TOOL]
        options: Any = {"stream_options": {"include_usage": True}} if usage else {}
        stream = await openai.chat.completions.create(
            model="m", messages=HELLO, tools=tools, stream=True, **options
        )
        chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    calls = [
        call
        for chunk in chunks
        if chunk.choices
        for call in chunk.choices[0].delta.tool_calls or ()
    ]
    assert text == "sure"
    assert [call.function and call.function.arguments for call in calls] == ['{"to": "north"}']
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "tool_calls"
    assert (chunks[-1].usage is not None) is usage
    assert session.answered == 1


async def test_stop_strings_end_the_text_and_the_ids_are_kept_through_the_match() -> None:
    policy = Remembering(lambda read: "think\nObservation: I make it up")
    async with client(policy) as (openai, session):
        reply = await openai.chat.completions.create(
            model="m", messages=HELLO, stop=["Observation:", "zzz"]
        )
        assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == (
            "think\n",
            "stop",
        )
        messages: Any = [
            *HELLO,
            {"role": "assistant", "content": "think\n"},
            {"role": "user", "content": "seen"},
        ]
        await openai.chat.completions.create(model="m", messages=messages)
    episode = session.graph.episode(0, StopReason.TERMINATED)
    sampled, kept = policy.answered[0].generation.ids, episode.turns[0].output_ids
    assert (kept, episode.branches) == (sampled[: len(kept)], ())
    assert CHAT.decode(kept).endswith("Observation:")
    assert len(kept) == len(episode.turns[0].logprobs) < len(sampled)
    assert policy.answered[1].ids == episode.prompt_ids + kept + episode.turns[0].observation_ids


async def test_logprobs_are_those_of_the_sampled_tokens() -> None:
    policy = Remembering()
    async with client(policy) as (openai, _):
        reply = await openai.chat.completions.create(
            model="m", messages=HELLO, logprobs=True, max_tokens=5
        )
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert (
        tuple(token.logprob for token in logprobs.content) == policy.answered[0].generation.logprobs
    )
    assert reply.usage is not None
    assert reply.usage.completion_tokens == len(logprobs.content) <= 5
    assert reply.usage.prompt_tokens == len(policy.answered[0].ids)


async def test_sampling_is_the_tickets_and_what_has_no_effect_is_said() -> None:
    policy = Remembering(lambda read: "ok " * 50)
    async with client(policy, ticket(max_turn_tokens=7)) as (openai, session):
        options: Any = {
            "temperature": 0.2,
            "seed": 3,
            "logit_bias": {"5": 1},
            "tool_choice": "required",
        }
        raw = await openai.chat.completions.with_raw_response.create(
            model="m", messages=HELLO, max_tokens=99, tools=[TOOL], **options
        )
        assert raw.headers["x-horizonrl-ignored"] == "logit_bias, seed, temperature, tool_choice"
        assert session.metrics.value("gateway_parameters_ignored_total") == 4
        choice = raw.parse().choices[0]
        assert choice.finish_reason == "length"
        assert len(policy.answered[0].generation.ids) == 7


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"n": 2}, "unsupported_parameter"),
        ({"functions": [{"name": "f"}]}, "unsupported_parameter"),
        ({"messages": []}, "invalid_request"),
        ({"messages": [{"role": "critic", "content": "x"}]}, "invalid_request"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "unsupported_content",
        ),
        ({"tools": [{"type": "function", "name": "go"}]}, "invalid_request"),
        ({"tools": ["go"]}, "invalid_request"),
        (
            {"tools": [TOOL | {"function": TOOL["function"] | {"description": {"en": "Go."}}}]},
            "invalid_request",
        ),
        (
            {"messages": [{"role": "user", "content": "".join(map(chr, range(0xE000, 0xF900)))}]},
            "invalid_conversation",
        ),
        ({"max_tokens": 0}, "invalid_request"),
        ({"stop": [""]}, "invalid_request"),
        ({"messages": [{"role": "user"}]}, "invalid_request"),
        ({"stream": "yes"}, "invalid_request"),
        ({"extra_headers": {"X-Train": "banana"}}, "invalid_request"),
        ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "invalid_request"),
        ({"stream": True, "stream_options": True}, "invalid_request"),
        ({"tools": [TOOL | {"function": {"name": "f", "parameters": NESTED}}]}, "invalid_request"),
        ({"messages": [{"role": "user", "content": "x" * 9000}]}, "context_length_exceeded"),
    ],
)
async def test_what_cannot_be_served_is_refused_with_a_code_and_costs_no_call(
    body: dict[str, Any], code: str
) -> None:
    policy = Remembering(lambda read: "ok", max_context_tokens=2000)
    async with client(policy, ticket(horizon_turns=1)) as (openai, _):
        with pytest.raises(BadRequestError) as refused:
            await openai.chat.completions.create(**{"model": "m", "messages": HELLO} | body)  # type: ignore[call-overload]
        assert refused.value.code == code
        await openai.chat.completions.create(model="m", messages=HELLO)


@pytest.mark.parametrize("content", ["x" * 20_000, "word " * 4_000, "x " * 8_000_000])
async def test_a_text_far_beyond_the_context_is_not_rendered_on_the_event_loop(
    content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ChatTemplate, "render", None)

    async with client(Remembering(max_context_tokens=2000)) as (openai, session):
        with pytest.raises(BadRequestError) as refused:
            await openai.chat.completions.create(
                model="m", messages=[{"role": "user", "content": content}]
            )
        assert (refused.value.code, session.cut) == (
            "context_length_exceeded",
            StopReason.CONTEXT,
        )


WORDS = "word " * 400_000


def described(text: str) -> dict[str, Any]:
    return TOOL | {"function": TOOL["function"] | {"description": text}}


CALLED: Any = {
    "id": "a",
    "type": "function",
    "function": {"name": "go", "arguments": json.dumps({"to": WORDS})},
}
LONG: dict[str, Any] = {
    "tool": {"tools": [described(WORDS)]},
    "tools": {"tools": [described("d" * 100)] * 10_000},
    "arguments": {
        "tools": [TOOL],
        "messages": [
            *HELLO,
            {"role": "assistant", "tool_calls": [CALLED]},
            {"role": "tool", "tool_call_id": "a", "content": "there"},
        ],
    },
    "reasoning": {
        "messages": [*HELLO, {"role": "assistant", "content": "a", "reasoning": WORDS}, *HELLO]
    },
    "messages": {"messages": [{"role": "user", "content": ""}] * 60_000},
}


@pytest.mark.parametrize("part", LONG)
async def test_no_part_of_a_request_that_is_far_too_long_is_rendered_on_the_event_loop(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, loop_thread = ChatTemplate._write, threading.get_ident()
    threads: set[int] = set()

    def noted(chat: ChatTemplate, *given: Any) -> str:
        threads.add(threading.get_ident())
        return written(chat, *given)

    monkeypatch.setattr(ChatTemplate, "_write", noted)
    monkeypatch.setattr(ChatTemplate, "render", None)

    async with session_of(Remembering()) as (gateway, session):
        status, body = await post(gateway, session, {"messages": HELLO} | LONG[part])
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
        assert session.cut is StopReason.CONTEXT
    assert loop_thread not in threads


async def test_thoughts_that_the_template_leaves_out_are_not_counted() -> None:
    policy, chat = Remembering(lambda read: "ok"), ChatTemplate(tool_tokenizer(THINKING))
    async with Gateway(policy, chat).open() as gateway, gateway.session(ticket(), 0) as session:
        messages = [
            *HELLO,
            {"role": "assistant", "content": "a", "reasoning": "word " * 20_000},
            *HELLO,
        ]
        assert (await post(gateway, session, {"messages": messages}))[0] == 200


async def post(
    gateway: Gateway,
    session: Session | None,
    body: Any,
    path: str = "chat/completions",
    **headers: str,
) -> tuple[int, Any]:
    sent = headers or {"Authorization": f"Bearer {session.key if session else 'guess'}"}
    raw = io.BytesIO(json.dumps(body).encode())
    async with (
        ClientSession() as http,
        http.post(f"{gateway.base_url}/{path}", data=raw, headers=sent) as answer,
    ):
        return answer.status, await answer.json()


def test_what_the_parser_refuses_is_counted_and_logged_once_per_code_and_episode() -> None:
    async def scenario() -> None:
        policy = Remembering(lambda read: "ok")
        image = {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}
        async with gateway_of(policy) as gateway:
            for number in (1, 2):
                async with gateway.session(ticket(), number) as session:
                    for body in (image, image, {"messages": []}, {"messages": HELLO}):
                        await post(gateway, session, body)
                assert (await post(gateway, session, {"messages": HELLO}))[0] == 409
            for _ in range(2):
                assert (await post(gateway, None, {"messages": HELLO}))[0] == 401
                assert (await post(gateway, session, {}, "embeddings"))[0] == 404
            assert gateway.metrics.value("gateway_calls_total", reason="refused") == 12
            assert gateway.metrics.value("gateway_calls_total", reason="answered") == 2

    with capture_logs() as logs:
        run(scenario)
    told = [(log["code"], log["task"]) for log in logs if log["event"] == "gateway_refused"]
    once = [("unsupported_content", "one"), ("invalid_request", "one")]
    assert told == [*once, *once, ("invalid_api_key", None), ("not_found", None)]
    assert {log["log_level"] for log in logs} == {"warning"}
    assert "image_url" in logs[0]["reason"]


def test_what_ends_an_episode_is_counted_by_its_own_code_and_is_no_refusal_of_the_parser() -> None:
    async def scenario() -> None:
        async with session_of(Remembering(lambda read: "ok"), ticket(horizon_turns=1)) as (
            gateway,
            session,
        ):
            for _ in range(3):
                await post(gateway, session, {"messages": HELLO})
            values = (
                gateway.metrics.value("gateway_calls_total", reason=r)
                for r in ("refused", "horizon_reached")
            )
            assert [*values] == [0, 2]

    with capture_logs() as logs:
        run(scenario)
    assert logs == []


async def test_what_changes_nothing_is_accepted_and_named() -> None:
    policy = Remembering(lambda read: CALLING)
    async with session_of(policy) as (gateway, session):
        speaker = [HELLO[0] | {"name": "anna"}, {"role": "assistant", "content": "I"}]
        hosted = [{"type": kind} for kind in ("web_search", "namespace", "custom", "custom")]
        odd = {"a\r\nb": 1, "modalities": ["text", "audio"]}
        _, body = await post(
            gateway, session, {"messages": speaker, "tools": [*hosted, TOOL]} | odd
        )
        ignored = [
            "a\r\nb",
            "modalities",
            "prefill",
            "tools.custom",
            "tools.namespace",
            "tools.web_search",
        ]
        assert body["horizonrl"]["ignored"] == [*ignored, "messages.name"]
        assert body["choices"][0]["finish_reason"] == "tool_calls"
        _, body = await post(gateway, session, {"messages": HELLO, "modalities": ["text"]})
        assert body["horizonrl"]["ignored"] == []
        _, body = await post(gateway, session, {"input": "hello", "tools": hosted}, "responses")
        assert body["horizonrl"]["ignored"] == [
            "tools.custom",
            "tools.namespace",
            "tools.web_search",
        ]
        assert [item["type"] for item in body["output"]] == ["message"]


async def test_a_key_is_found_wherever_a_client_sends_it_and_a_slash_at_the_end_is_nothing() -> (
    None
):
    async with session_of(Remembering(lambda read: "ok")) as (gateway, session):
        right = f"Bearer {session.key}"
        ways = ({"api-key": session.key}, {"x-api-key": "other", "Authorization": right})
        for headers in ways:
            for path in ("chat/completions", "chat/completions/"):
                assert (await post(gateway, None, {"messages": HELLO}, path, **headers))[0] == 200
        assert (await post(gateway, None, {"messages": HELLO}, **{"x-api-key": "other"}))[0] == 401


async def test_a_conversation_that_needs_one_branch_too_many_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def cannot(chat: ChatTemplate, *_: Any) -> Any:
        raise ConfigError("the template cannot append this")

    monkeypatch.setattr(ChatTemplate, "extend", cannot)
    monkeypatch.setattr(matching, "MAX_BRANCHES", 1)

    async with client(Remembering(lambda read: "ok")) as (openai, session):
        await openai.chat.completions.create(model="m", messages=HELLO)
        messages: Any = [
            *HELLO,
            {"role": "assistant", "content": "ok"},
            {"role": "user", "content": "on"},
        ]
        # It continues a reply, but only as a conversation of its own; or none.
        for body in (messages, HELLO):
            with pytest.raises(BadRequestError) as refused:
                await openai.chat.completions.create(model="m", messages=body)
            assert (refused.value.code, session.cut) == (
                "too_many_branches",
                StopReason.ENV_TRUNCATED,
            )


async def test_paths_that_are_not_served_are_refused_as_calls_are() -> None:
    async with client(Remembering()) as (openai, _):
        assert (await openai.models.retrieve("policy")).id == "policy"
        with pytest.raises(NotFoundError) as refused:
            await openai.embeddings.create(model="m", input="x")
        assert refused.value.code == "not_found"


async def test_a_client_that_goes_in_the_middle_of_its_body_is_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with session_of(Remembering()) as (gateway, session):
        _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {session.key}\r\n"
        writer.write(f"{head}Content-Length: 1000\r\n\r\n{{".encode())
        await writer.drain()
        await asyncio.sleep(0.1)
        writer.close()
        await writer.wait_closed()
        await asyncio.sleep(0.1)
    assert caplog.records == []


async def test_halves_of_characters_and_odd_bodies_do_no_harm() -> None:
    async with (
        session_of(Remembering(lambda read: "ok")) as (gateway, session),
        ClientSession() as http,
    ):
        headers = {"Authorization": f"Bearer {session.key}"}
        url = f"{gateway.base_url}/chat/completions"
        half = b'{"messages": [{"role": "user", "content": "\\ud83d"}]}'
        for raw, status in (
            (half, 200),
            (b"[]", 400),
            (b"{", 400),
            (b"[" * 100_000, 400),
            (b"", 400),
        ):
            async with http.post(url, data=raw, headers=headers) as answer:
                assert answer.status == status
        async with http.post(
            url, data=io.BytesIO(b"x" * (server.BODY_BYTES + 1)), headers=headers
        ) as answer:
            assert answer.status == 413


async def test_the_key_comes_in_three_ways_and_dies_with_the_episode() -> None:
    async with gateway_of(Remembering(lambda read: "ok")) as gateway, ClientSession() as http:
        async with gateway.session(ticket(), 0) as session:
            root = gateway.base_url.removesuffix("/v1")
            ways: list[tuple[str, dict[str, str]]] = [
                (f"{root}/v1", {"Authorization": f"Bearer {session.key}"}),
                (f"{root}/v1", {"Authorization": f"bearer {session.key}"}),
                (f"{root}/v1", {"x-api-key": session.key}),
                (f"{root}/e/{session.key}/v1", {"Authorization": "Bearer sk-something"}),
            ]
            for base, headers in ways:
                body = {"messages": HELLO}
                async with http.post(
                    f"{base}/chat/completions", json=body, headers=headers
                ) as answer:
                    assert answer.status == 200
                for path in ("models", "models/Qwen/Qwen3-8B"):
                    async with http.get(f"{base}/{path}", headers=headers) as answer:
                        assert answer.status == 200
        assert len(session.key) >= 22
        async with client_of(gateway, session) as openai:
            with pytest.raises(ConflictError):
                await openai.chat.completions.create(model="m", messages=HELLO)
        async with AsyncOpenAI(base_url=gateway.base_url, api_key="guess", max_retries=0) as openai:
            with pytest.raises(AuthenticationError):
                await openai.chat.completions.create(model="m", messages=HELLO)
            with pytest.raises(AuthenticationError):
                await openai.models.list()


async def test_parallel_calls_never_exceed_the_horizon_and_the_last_is_marked() -> None:
    policy = Remembering(token_s=0.001)
    async with client(policy, ticket(horizon_turns=3)) as (openai, session):
        calls = [openai.chat.completions.create(model="m", messages=HELLO) for _ in range(8)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        served: Any = [answer for answer in answers if not isinstance(answer, BaseException)]
        refused = [answer for answer in answers if isinstance(answer, BadRequestError)]
        assert (len(served), len(refused), len(policy.answered)) == (3, 5, 3)
        assert {answer.code for answer in refused} == {"horizon_reached"}
        assert sorted(answer.horizonrl["last_call"] for answer in served) == [
            False,
            False,
            True,
        ]
        assert session.over.is_set()
    episode = session.graph.episode(0, StopReason.HORIZON)
    assert len(episode.branches) == 2
    assert_trained_is_sampled(episode, policy)


async def test_parallel_calls_that_continue_one_reply_fork_it() -> None:
    policy = Remembering(lambda read: "ok", token_s=0.001)
    async with client(policy) as (openai, session):
        await openai.chat.completions.create(model="m", messages=HELLO)
        history: Any = [*HELLO, {"role": "assistant", "content": "ok"}]
        nexts: Any = [[*history, {"role": "user", "content": text}] for text in ("a", "b", "c")]
        calls = (openai.chat.completions.create(model="m", messages=messages) for messages in nexts)
        await asyncio.gather(*calls)
    episode = session.graph.episode(0, StopReason.TERMINATED)
    assert [turn.branch for turn in episode.turns].count(0) == 2
    assert {branch.prompt_ids[: len(episode.prompt_ids)] for branch in episode.branches} == {
        episode.prompt_ids
    }
    assert_trained_is_sampled(episode, policy)


async def test_weights_that_change_in_the_middle_of_a_reply_are_in_its_spans() -> None:
    policy = Remembering()

    def reply(ids: Any) -> Any:
        yield from CHAT.encode_turn("long")[:2]
        policy._version = PolicyVersion(version=1)
        yield from CHAT.encode_turn("longer")

    policy._script = reply
    async with client(policy) as (openai, session):
        await openai.chat.completions.create(model="m", messages=HELLO)
    spans = session.graph.episode(0, StopReason.TERMINATED).turns[0].spans
    assert [(span.version, span.tokens) for span in spans[:1]] == [(0, 2)]
    assert [span.version for span in spans] == [0, 1]


async def test_the_remaining_turns_are_announced_to_the_policy_and_not_to_the_program() -> None:
    policy = Remembering(lambda read: "ok")
    async with client(policy, ticket(horizon_turns=5, announce=True)) as (openai, session):
        messages = list(HELLO)
        for _ in range(2):
            await openai.chat.completions.create(model="m", messages=messages)
            messages += [
                {"role": "assistant", "content": "ok"},
                {"role": "user", "content": "on"},
            ]
    episode = session.graph.episode(0, StopReason.TERMINATED)
    assert (episode.prompt, episode.turns[0].observation) == (
        "hello\n[5 turns left]",
        "on\n[4 turns left]",
    )
    assert (episode.branches, len(episode.turns)) == ((), 2)
