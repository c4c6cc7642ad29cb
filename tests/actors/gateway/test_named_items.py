"""A request may name what the gateway made: items and responses of its episode, and calls by their ids."""

from typing import Any

import pytest
from aiohttp import ClientSession

from horizonrl.actors.gateway.server import Gateway
from horizonrl.actors.gateway.session import Session
from horizonrl.common.types import StopReason
from tests.actors.gateway.served import (
    TOOL,
    Remembering,
    assert_trained_is_sampled,
    session_of,
)

FLAT = {"type": "function", **TOOL["function"]}
QUESTION = {"role": "user", "content": [{"type": "input_text", "text": "hello"}]}
CALL = '<tool_call>\n{"name": "go", "arguments": {"to": "north"}}\n</tool_call>'
TWO = f"sure\n{CALL}\n{CALL.replace('north', 'south')}"


async def post(
    gateway: Gateway, session: Session, path: str, body: dict[str, Any]
) -> tuple[int, dict[str, Any]]:
    headers = {"Authorization": f"Bearer {session.key}"}
    url = f"{gateway.base_url}/{path}"
    async with ClientSession() as http, http.post(url, json=body, headers=headers) as answer:
        return answer.status, await answer.json()


def reference(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "item_reference", "id": item["id"]}


def output_of(call: dict[str, Any], text: str = "result") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call["call_id"], "output": text}


def assert_one_branch(session: Session, policy: Remembering, turns: int) -> None:
    episode = session.graph.episode(0, StopReason.TERMINATED)
    assert (episode.branches, len(episode.turns)) == ((), turns)
    assert_trained_is_sampled(episode, policy)


@pytest.mark.parametrize(
    "written", [f"sure\n{CALL}", f"<think>hm</think>\n{CALL}", f"<think>hm</think>sure\n{CALL}"]
)
@pytest.mark.parametrize(
    "named", [("message", "reasoning"), ("message", "reasoning", "function_call")]
)
async def test_items_that_a_client_names_are_those_of_the_episodes_replies(
    written: str, named: tuple[str, ...]
) -> None:
    """As AI SDK 6 sends them: texts and thoughts by their id, and calls whole."""

    policy = Remembering(lambda read: written if read.count("result") < 2 else "done")
    async with session_of(policy) as (gateway, session):
        items: list[dict[str, Any]] = [QUESTION]
        for _ in range(3):
            status, response = await post(
                gateway, session, "responses", {"input": items, "tools": [FLAT]}
            )
            assert status == 200, response
            items += [
                reference(item) if item["type"] in named else item for item in response["output"]
            ]
            items += [
                output_of(item) for item in response["output"] if item["type"] == "function_call"
            ]
    assert_one_branch(session, policy, turns=3)


@pytest.mark.parametrize("instructions", [None, "Be brief."])
async def test_a_response_that_a_client_names_is_continued_with_its_whole_conversation(
    instructions: str | None,
) -> None:
    policy = Remembering(lambda read: TWO if "[b]" not in read else "done")
    async with session_of(policy) as (gateway, session):
        common = {"tools": [FLAT], "instructions": instructions}
        _, first = await post(gateway, session, "responses", common | {"input": "hello"})
        one, two = first["output"][1:]
        results = [output_of(two, "[b]"), output_of(one, "[a]")]
        following = common | {"previous_response_id": first["id"]}
        status, second = await post(gateway, session, "responses", following | {"input": results})
        assert status == 200, second
        assert second["horizonrl"]["ignored"] == []
        last = common | {"input": "and on", "previous_response_id": second["id"]}
        await post(gateway, session, "responses", last)
    assert_one_branch(session, policy, turns=3)
    read = session.graph.episode(0, StopReason.TERMINATED).turns[0].observation
    assert read.index("[a]") < read.index("[b]")


async def test_instructions_are_those_of_the_request_not_of_the_response_that_it_names() -> None:
    async with session_of(Remembering(lambda read: "ok")) as (gateway, session):
        _, first = await post(
            gateway, session, "responses", {"input": "hello", "instructions": "Be brief."}
        )
        body = {"input": "on", "instructions": "Be long.", "previous_response_id": first["id"]}
        await post(gateway, session, "responses", body)
    sample = session.graph.samples[1]
    assert [message.content for message in sample.messages] == ["Be long.", "hello", "ok", "on"]


@pytest.mark.parametrize(
    ("body", "parameter"),
    [
        ({"input": [QUESTION, {"type": "item_reference", "id": "msg_0123"}]}, "input"),
        ({"input": [QUESTION, {"type": "item_reference"}]}, "input"),
        ({"input": "hello", "previous_response_id": "resp_0123"}, "previous_response_id"),
        ({"input": "hello", "previous_response_id": 7}, "previous_response_id"),
        ({"input": "hello", "instructions": [QUESTION]}, "instructions"),
    ],
)
async def test_an_id_that_no_reply_of_the_episode_has_is_refused(
    body: dict[str, Any], parameter: str
) -> None:
    async with session_of(Remembering(lambda read: "ok")) as (gateway, session):
        status, refused = await post(gateway, session, "responses", body)
    assert (status, refused["error"]["code"], refused["error"]["param"]) == (
        400,
        "invalid_request",
        parameter,
    )


async def test_another_episodes_replies_cannot_be_named() -> None:
    async with session_of(Remembering(lambda read: "ok")) as (gateway, session):
        _, response = await post(gateway, session, "responses", {"input": "hello"})
        async with gateway.session(session.ticket, 1) as sibling:
            body = {"input": "on", "previous_response_id": response["id"]}
            assert (await post(gateway, sibling, "responses", body))[0] == 400


@pytest.mark.parametrize("written", [f"sure\n{CALL}", TWO])
async def test_words_that_a_client_leaves_out_beside_calls_are_found_by_the_ids_of_the_calls(
    written: str,
) -> None:
    """As CrewAI and Semantic Kernel do in Chat Completions, and agno in Responses."""

    policy = Remembering(lambda read: written if read.count("result") < 4 else "done")
    async with session_of(policy) as (gateway, session):
        messages: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
        for _ in range(3):
            body = {"messages": messages, "tools": [TOOL]}
            message = (await post(gateway, session, "chat/completions", body))[1]["choices"][0][
                "message"
            ]
            calls = message.get("tool_calls", [])
            messages.append({"role": "assistant", "content": None, "tool_calls": calls})
            messages += [
                {"role": "tool", "tool_call_id": call["id"], "content": "result"} for call in calls
            ]
    assert_one_branch(session, policy, turns=3)


async def test_words_that_a_client_leaves_out_of_responses_are_found_too_and_other_calls_are_not_completed() -> (
    None
):
    policy = Remembering(lambda read: f"sure\n{CALL}")
    async with session_of(policy) as (gateway, session):
        tools = {"tools": [FLAT]}
        _, response = await post(gateway, session, "responses", tools | {"input": [QUESTION]})
        call = response["output"][-1]
        await post(
            gateway, session, "responses", tools | {"input": [QUESTION, call, output_of(call)]}
        )
        edited = call | {"arguments": '{"to": "south"}'}
        await post(
            gateway,
            session,
            "responses",
            tools | {"input": [QUESTION, edited, output_of(call)]},
        )
    assert session.graph.samples[1].parent is session.graph.samples[0]
    assert session.graph.samples[2].parent is None
    assert session.graph.samples[2].messages[1].content == ""


async def test_calls_of_one_reply_stay_together_though_their_results_stand_between_them() -> None:
    policy = Remembering(lambda read: TWO if "[b]" not in read else "done")
    async with session_of(policy) as (gateway, session):
        tools = {"tools": [FLAT]}
        _, response = await post(gateway, session, "responses", tools | {"input": [QUESTION]})
        words, one, two = response["output"]
        items = [QUESTION, words, one, output_of(one, "[a]"), two, output_of(two, "[b]")]
        await post(gateway, session, "responses", tools | {"input": items})
    assert_one_branch(session, policy, turns=2)
