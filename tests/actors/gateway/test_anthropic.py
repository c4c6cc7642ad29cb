"""Anthropic's Messages by Anthropic's own client: whole and streamed, with tools, thoughts, refusals and counts."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import ClientSession
from anthropic import APIStatusError, AsyncAnthropic, BadRequestError, InternalServerError

from horizonrl.actors.gateway.session import Session
from horizonrl.common.errors import PolicyFailure
from horizonrl.common.types import StopReason
from tests.actors.gateway.served import (
    CHAT,
    Remembering,
    assert_trained_is_sampled,
    session_of,
    ticket,
)

CALL = '<tool_call>\n{"name": "go", "arguments": {"to": "north", "far": 1.0}}\n</tool_call>'
GO: Any = {
    "name": "go",
    "description": "Go somewhere.",
    "input_schema": {"type": "object", "properties": {"to": {"type": "string"}}},
}


@asynccontextmanager
async def anthropic(
    policy: Any, order: Any = None
) -> AsyncIterator[tuple[AsyncAnthropic, Session]]:
    async with session_of(policy, order) as (gateway, session):
        url = gateway.base_url.removesuffix("/v1")
        async with AsyncAnthropic(base_url=url, api_key=session.key, max_retries=0) as client:
            yield client, session


async def ask(client: AsyncAnthropic, messages: list[Any], stream: bool, **options: Any) -> Any:
    options = {"model": "policy", "max_tokens": 200, "messages": messages} | options
    if not stream:
        return await client.messages.create(**options)
    async with client.messages.stream(**options) as events:
        return await events.get_final_message()


def result(block: Any, text: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": block.id, "content": text}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_with_thoughts_and_tools_is_one_branch_of_sampled_ids(
    stream: bool,
) -> None:
    written = f"<think>hm</think>sure\n{CALL}\n{CALL.replace('north', 'south')}"
    policy = Remembering(lambda read: written if "north:" not in read else "done")

    async with anthropic(policy) as (client, session):
        messages: list[Any] = [{"role": "user", "content": "hello"}]
        options: Any = {
            "tools": [GO],
            "system": [
                {"type": "text", "text": "x-anthropic-billing-header: cch=1;"},
                {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
            ],
        }
        reply = await ask(client, messages, stream, **options)
        assert [block.type for block in reply.content] == [
            *("thinking", "text", "tool_use", "tool_use")
        ]
        assert (reply.stop_reason, reply.content[1].text) == ("tool_use", "sure")
        assert reply.content[2].input == {"to": "north", "far": 1.0}
        assert reply.usage.input_tokens == len(policy.answered[0].ids)
        assert reply.usage.output_tokens == len(policy.answered[0].generation.ids)
        north, south = reply.content[2:]
        options["system"][0]["text"] = "x-anthropic-billing-header: cch=2;"
        results = [
            result(south, "south: a wall"),
            result(north, [{"type": "text", "text": "north: a door"}]),
        ]
        said = [block.model_dump(exclude_none=True) for block in reply.content]
        messages += [
            {"role": "assistant", "content": said},
            {"role": "user", "content": [*results, {"type": "text", "text": "And now?"}]},
        ]
        last = await ask(client, messages, stream, **options)
        assert (last.stop_reason, last.content[0].text) == ("end_turn", "done")
        read = CHAT.decode(policy.answered[1].ids)
        assert read.index("a door") < read.index("a wall") < read.index("And now?")
        assert "Be brief." in read
        assert "billing" not in read
        episode = session.graph.episode(0, StopReason.TERMINATED)
        assert episode.branches == ()
        assert_trained_is_sampled(episode, policy)


async def test_a_call_whose_arguments_are_no_object_comes_back_as_it_was_sampled() -> None:
    written = '<tool_call>\n{"name": "go", "arguments": ["north"]}\n</tool_call>'
    policy = Remembering(lambda read: "done" if "a wall" in read else written)

    async with anthropic(policy) as (client, session):
        messages: list[Any] = [{"role": "user", "content": "hello"}]
        reply = await ask(client, messages, stream=False, tools=[GO])
        assert reply.content[0].input == {"arguments": '["north"]'}
        messages += [
            {"role": "assistant", "content": reply.content},
            {"role": "user", "content": [result(reply.content[0], "a wall")]},
        ]
        await ask(client, messages, stream=False, tools=[GO])
        assert session.graph.episode(0, StopReason.TERMINATED).branches == ()


async def test_limits_and_stop_sequences_say_how_a_reply_ended() -> None:
    policy = Remembering(lambda read: "one two three")

    async with anthropic(policy) as (client, _):
        hello: Any = [{"role": "user", "content": "hello"}]
        cut = await ask(client, hello, stream=False, max_tokens=3)
        assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 3)
        stopped = await ask(client, hello, stream=False, stop_sequences=["nine", "two"])
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "two")
        assert stopped.content[0].text == "one "


async def test_what_has_no_effect_is_named_and_what_costs_nothing_is_not() -> None:
    async with anthropic(Remembering(lambda read: CALL)) as (client, _):
        reply = await client.messages.with_raw_response.create(
            model="policy",
            max_tokens=99,
            messages=[{"role": "user", "content": "hello"}],
            tools=[GO, {"type": "web_search_20250305", "name": "web_search"}],
            tool_choice={"type": "none"},
            thinking={"type": "enabled", "budget_tokens": 1024},
            metadata={"user_id": "me"},
            extra_body={"temperature": 1.0},
        )
        named = "temperature, thinking, tools.web_search_20250305"
        assert reply.headers["x-horizonrl-ignored"] == named
        message = await reply.parse()
        assert message.content[0].type == "text", "tool_choice none keeps the reply text"
        forced = await client.messages.with_raw_response.create(
            model="policy",
            max_tokens=99,
            messages=[{"role": "user", "content": "hello"}],
            tools=[GO],
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
        )
        assert forced.headers["x-horizonrl-ignored"] == "parallel_tool_calls, tool_choice"


async def test_tokens_are_counted_without_a_call() -> None:
    policy = Remembering()

    async with anthropic(policy) as (client, session):
        hello: Any = [{"role": "user", "content": "hello"}]
        counted = await client.messages.count_tokens(model="policy", messages=hello, tools=[GO])
        assert not policy.answered
        assert not session.graph.samples
        await ask(client, hello, stream=False, tools=[GO])
        assert counted.input_tokens == len(policy.answered[0].ids)
        with pytest.raises(BadRequestError, match="no message has the role 'robot'"):
            await client.messages.count_tokens(
                model="policy",
                messages=[{"role": "robot", "content": "hello"}],  # type: ignore[typeddict-item]
            )


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "at least one message"),
        (["hello"], "a message is an object"),
        ([{"role": "user", "content": [{"type": "image", "source": {}}]}], "only text is read, not 'image'"),
        ([{"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}], "a function with a name"),
    ],
)  # fmt: skip
async def test_a_body_that_cannot_be_read_is_refused_in_anthropics_form(
    messages: list[Any], words: str
) -> None:
    async with anthropic(Remembering()) as (client, session):
        with pytest.raises(BadRequestError) as refused:
            await ask(client, messages, stream=False)
        error: Any = refused.value.body
        assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
        assert words in error["error"]["message"]
        assert session.refusals.total() == 1


async def test_a_conversation_beyond_the_context_is_refused_in_words_that_clients_know() -> None:
    """Claude Code compacts its history when it reads them."""

    async with anthropic(Remembering(max_context_tokens=300)) as (client, _):
        with pytest.raises(BadRequestError, match="prompt is too long: the conversation has"):
            await ask(client, [{"role": "user", "content": "word " * 400}], stream=False)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_end_of_the_horizon_and_an_engine_that_fails_are_errors_of_their_kind(
    stream: bool,
) -> None:
    class Failing(Remembering):
        async def generate(self, ids: Any, **options: Any) -> Any:
            if self.answered:
                raise PolicyFailure("out of luck")
            return await super().generate(ids, **options)

    hello: Any = [{"role": "user", "content": "hello"}]
    async with anthropic(Failing(), ticket(2)) as (client, _):
        await ask(client, hello, stream)
        with pytest.raises(APIStatusError, match="out of luck") as failed:
            await ask(client, hello, stream)
        assert isinstance(failed.value, InternalServerError)
    async with anthropic(Remembering(), ticket(1)) as (client, _):
        await ask(client, hello, stream)
        with pytest.raises(BadRequestError, match="the episode's horizon is 1 model calls"):
            await ask(client, hello, stream)


async def test_a_client_that_asks_whether_anybody_is_there_has_made_no_mistake() -> None:
    """Claude Code does at its start."""

    async with session_of(Remembering()) as (gateway, session), ClientSession() as http:
        async with http.head(gateway.base_url.removesuffix("/v1")) as answer:
            assert answer.status == 404
        assert not session.refusals
        assert not gateway._refusals
