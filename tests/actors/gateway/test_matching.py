"""Random trees of messages: whatever a program sends, each sampled id stands in the record once, after what it read."""

import asyncio
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horizonrl.actors.chat.messages import ChatMessage, ToolCall
from horizonrl.actors.gateway.calls import Answer, CallRefused, CallRequest
from horizonrl.actors.gateway.matching import MatchingGraph, TooManyBranches, canonical
from horizonrl.actors.gateway.session import Call, Session
from horizonrl.actors.policy import Generation
from horizonrl.common.types import MAX_BRANCHES, StopReason, VersionSpan
from tests.actors.gateway.served import (
    CHAT,
    TOOL,
    JsonCalls,
    Remembering,
    assert_trained_is_sampled,
    ticket,
)

TEXTS = st.sampled_from(["", "go on", "<|im_end|>", "a\nb ", "<|im_start|>assistant\n", "é"])
TAILS = st.one_of(
    TEXTS.map(lambda text: (ChatMessage("user", text),)),
    TEXTS.map(lambda text: (ChatMessage("tool", text),)),
    TEXTS.map(
        lambda text: (ChatMessage("tool", text), ChatMessage("tool", "b"), ChatMessage("user", "c"))
    ),
    st.just((ChatMessage("user", "one"), ChatMessage("user", "two"))),  # as in a group chat
    st.just((ChatMessage("system", "be quick"),)),
)
STEPS = st.lists(
    st.tuples(st.integers(0, 7), st.integers(0, 3), TAILS, st.integers(1, 3)),
    min_size=1,
    max_size=8,
)
"""(which history goes on, how many of its last messages are dropped, what follows, how often at once)."""


def reply_message(answer: Answer) -> ChatMessage:
    return ChatMessage("assistant", answer.content, answer.calls)


@given(steps=STEPS, tools=st.booleans(), seed=st.integers(0, 99))
def test_every_call_of_a_random_program_stands_in_the_record_once(
    steps: list[tuple[int, int, tuple[ChatMessage, ...], int]], tools: bool, seed: int
) -> None:
    async def scenario() -> None:
        policy = Remembering(seed=seed)
        session = Session(
            policy, CHAT, ticket(horizon_turns=99, max_turn_tokens=8), 0, parser=JsonCalls()
        )
        histories: list[tuple[ChatMessage, ...]] = [(ChatMessage("user", "begin"),)]
        for which, dropped, tail, times in steps:
            history = histories[which % len(histories)]
            history = history[: max(0, len(history) - dropped)]
            messages = (
                (*history, *tail)
                if history and history[-1].role == "assistant"
                else (*history, *tail[-1:])
            )
            request = CallRequest(messages, (TOOL,) if tools else ())
            calls: list[Call] = []
            for _ in range(times):
                with suppress(CallRefused):  # a conversation that the template refuses
                    calls.append(session.begin(request, b"", None, retried=False, trained=True))
            for call in calls:
                call.sample.delivered = True
                answer = await call.answered
                assert isinstance(answer, Answer)
                histories.append((*messages, reply_message(answer)))
        await session.close()
        if policy.answered:
            episode = session.graph.episode(0, StopReason.TERMINATED)
            assert_trained_is_sampled(episode, policy)
            assert len(episode.turns) == len(policy.answered)

    asyncio.run(scenario())


def generation(*ids: int) -> Generation:
    return Generation(
        ids, (-0.5,) * len(ids), (VersionSpan(version=0, lineage=0, tokens=len(ids)),)
    )


def test_a_linear_program_has_no_branches_and_observations_between_its_turns() -> None:
    graph = MatchingGraph()
    messages: tuple[ChatMessage, ...] = (ChatMessage("user", "hi"),)
    for number in range(3):
        sample = graph.reserve(messages)
        sample.appended_ids, sample.delivered = (number,), True
        graph.complete(
            sample,
            generation(10 + number),
            reply := ChatMessage("assistant", f"r{number}"),
            f"r{number}",
        )
        messages = (*messages, reply, ChatMessage("user", f"u{number}"))
    episode = graph.episode(0, StopReason.TERMINATED, reward=2.0)
    assert (episode.branches, episode.prompt_ids, episode.prompt) == ((), (0,), "hi")
    assert [turn.observation_ids for turn in episode.turns] == [(1,), (2,), ()]
    assert [turn.reward for turn in episode.turns] == [0.0, 0.0, 2.0]
    assert [turn.observation for turn in episode.turns] == ["u0", "u1", ""]


def test_an_edited_history_forks_with_a_copy_of_the_ids_before_it() -> None:
    graph, first = MatchingGraph(), (ChatMessage("user", "hi"),)
    root = graph.reserve(first)
    root.appended_ids, root.delivered = (1, 2), True
    graph.complete(root, generation(3), answer := ChatMessage("assistant", "a"), "a")
    for text in ("x", "y"):
        sample = graph.reserve((*first, answer, ChatMessage("user", text)))
        assert sample.parent is root
        sample.appended_ids, sample.delivered = (ord(text),), True
        graph.complete(sample, generation(9), ChatMessage("assistant", "b"), "b")
    episode = graph.episode(0, StopReason.TERMINATED)
    assert [branch.prompt_ids for branch in episode.branches] == [(1, 2, 3, ord("y"))]
    assert [turn.branch for turn in episode.turns] == [0, 0, 1]


def test_a_call_that_failed_leaves_its_place_to_the_next_one() -> None:
    graph, first = MatchingGraph(), (ChatMessage("user", "hi"),)
    root = graph.reserve(first)
    graph.complete(root, generation(3), answer := ChatMessage("assistant", "a"), "a")
    graph.release(graph.reserve((*first, answer, ChatMessage("user", "x"))))
    assert not graph.reserve((*first, answer, ChatMessage("user", "x"))).forks


@pytest.mark.parametrize(
    ("echoed", "matches"),
    [
        (ChatMessage("assistant", "a", (ToolCall("go", '{"x": 1, "y": 2}'),)), True),
        (ChatMessage("assistant", "a", (ToolCall("go", '{"y":2,"x":1}'),)), True),
        (ChatMessage("assistant", "a", (ToolCall("go", '{"y":2,"x":1}'),), "hm"), True),
        (ChatMessage("assistant", "a", (ToolCall("go", '{"y":2,"x":1}'),), "other"), False),
        (ChatMessage("assistant", "a", (ToolCall("go", '{"y":3,"x":1}'),)), False),
        (ChatMessage("assistant", "a\n", (ToolCall("go", '{"x": 1.0, "y": 2e0}'),)), True),
        (ChatMessage("assistant", "a", (ToolCall("go", '{"x": 1.5, "y": 2}'),)), False),
        (ChatMessage("assistant", "b", (ToolCall("go", '{"x": 1, "y": 2}'),)), False),
        (ChatMessage("assistant", "a "), False),
        (ChatMessage("user", "a"), False),
    ],
)
def test_a_reply_is_known_by_role_content_and_calls_and_reasoning_may_be_left_out(
    echoed: ChatMessage, matches: bool
) -> None:
    graph, first = MatchingGraph(), (ChatMessage("user", "hi"),)
    root = graph.reserve(first, (TOOL,))
    served = ChatMessage("assistant", "a", (ToolCall("go", '{"x": 1, "y": 2}'),), "hm")
    graph.complete(root, generation(3), served, "")
    messages = (*first, echoed, ChatMessage("tool", "done"))
    assert (graph.reserve(messages, (TOOL,)).parent is root) is matches
    assert graph.reserve(messages, ()).parent is None, "with other tools it is another conversation"


def test_equal_replies_are_continued_one_by_one() -> None:
    """Parallel samples of one prompt may be equal; each has its own ids."""
    graph, first, answer = (
        MatchingGraph(),
        (ChatMessage("user", "hi"),),
        ChatMessage("assistant", "a"),
    )
    roots = [graph.reserve(first) for _ in range(2)]
    for root, token in zip(roots, (5, 6), strict=True):
        graph.complete(root, generation(token), answer, "a")
    following = (*first, answer, ChatMessage("user", "x"))
    assert [graph.reserve(following).parent for _ in range(3)] == [roots[0], roots[1], roots[0]]


def test_replies_that_differ_in_white_space_alone_are_told_apart_by_clients_that_keep_it() -> None:
    graph, first = MatchingGraph(), (ChatMessage("user", "hi"),)
    following: list[tuple[ChatMessage, ...]] = []
    replies = []
    for text in ("ok", "ok\n", " ok"):
        root = graph.reserve(first)
        graph.complete(root, generation(5), answer := ChatMessage("assistant", text), text)
        replies.append(root)
        following.append((*first, answer, ChatMessage("user", "x")))
    assert [graph.reserve(messages).parent for messages in following] == replies
    # All are continued by now: the exact one is forked.
    assert [graph.reserve(messages).parent for messages in following] == replies
    last = graph.reserve(following[1])
    graph.complete(last, generation(6), reply := ChatMessage("assistant", "on\n"), "on\n")
    trimmed = (
        *first,
        ChatMessage("assistant", "ok"),
        ChatMessage("user", "x"),
        replace(reply, content="on"),
    )
    assert graph.reserve((*trimmed, ChatMessage("user", "y"))).parent is last


@pytest.mark.parametrize(
    ("roles", "continues"),
    [
        (("user", "user", "user"), True),
        (("tool", "system", "user"), True),
        (("system",), True),
        (("user", "assistant", "user"), False),
    ],
)
def test_whatever_is_no_reply_continues_one(roles: tuple[Any, ...], continues: bool) -> None:
    graph, first = MatchingGraph(), (ChatMessage("user", "hi"),)
    root = graph.reserve(first)
    graph.complete(root, generation(3), answer := ChatMessage("assistant", "a"), "a")
    tail = [ChatMessage(role, f"text {number}") for number, role in enumerate(roles)]
    assert (graph.reserve((*first, answer, *tail)).parent is root) is continues


def test_the_deepest_reply_is_continued() -> None:
    graph, messages = MatchingGraph(), (ChatMessage("user", "hi"),)
    for number in range(3):
        sample = graph.reserve(messages)
        graph.complete(
            sample, generation(number), reply := ChatMessage("assistant", str(number)), ""
        )
        messages = (*messages, reply, ChatMessage("user", "on"))
    assert graph.reserve(messages).parent is sample


def test_an_episode_has_no_more_branches_than_a_record() -> None:
    graph = MatchingGraph()
    for number in range(MAX_BRANCHES):
        graph.reserve((ChatMessage("user", str(number)),))
    with pytest.raises(TooManyBranches):
        graph.reserve((ChatMessage("user", "one more"),))


@given(st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=3), max_size=3))
def test_arguments_have_one_spelling(arguments: dict[str, object]) -> None:
    import json

    spellings = {
        canonical(json.dumps(arguments, indent=indent, ensure_ascii=indent is None))
        for indent in (None, 1)
    }
    assert len(spellings) == 1
    assert canonical("{broken") == "{broken"


@pytest.mark.parametrize(
    ("ours", "javascript"),
    [
        ('{"n": 1.0, "m": [2.50, -0.0]}', '{"n":1,"m":[2.5,0]}'),
        ('{"n": 1e3}', '{"n":1000}'),
        ('{"n": 1e21}', '{"n":1e+21}'),
        ('{"n": "1.0"}', '{"n":"1.0"}'),
    ],
)
def test_a_number_is_what_javascript_makes_of_it(ours: str, javascript: str) -> None:
    assert canonical(ours) == canonical(javascript)
    assert canonical('{"n": 1}') != canonical('{"n": true}') != canonical('{"n": "1"}')


def test_an_answer_that_nobody_read_is_counted_and_not_trained() -> None:
    graph = MatchingGraph()
    read, lost = (graph.reserve((ChatMessage("user", text),)) for text in "ab")
    for sample in (read, lost):
        sample.appended_ids = (1,)
        graph.complete(sample, generation(7), ChatMessage("assistant", "x"), "x")
    read.delivered = True
    episode = graph.episode(0, StopReason.TERMINATED)
    assert Counter(turn.trained for turn in episode.turns) == {True: 1, False: 1}
