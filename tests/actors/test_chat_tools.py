"""Conversations with tools: the template's own rendering, grown by appending, with no special token of a content."""

import json
import sys
from collections.abc import Sequence
from functools import cache
from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horizonrl.actors.chat.messages import ChatMessage, ToolCall, Tools
from horizonrl.actors.chat.template import CALL, ChatTemplate
from horizonrl.actors.chat.tool_calls import CallSyntax, parser_for
from horizonrl.common.errors import ConfigError
from horizonrl.ops.models.tiny_model import make_tokenizer
from tests.templates import (
    HERMES,
    MARKED_ADDED,
    SPECIAL,
    THINKING,
    XML,
    marked_tokenizer,
    tool_tokenizer,
)

TEMPLATES = {"hermes": HERMES, "xml": XML}
every_template = pytest.mark.parametrize("name", TEMPLATES)
WEATHER: Tools = (
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "tells the weather <of> a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    },
)

texts = st.text(max_size=30).filter(lambda text: "<|" not in text and "|>" not in text)
arguments = st.dictionaries(
    st.sampled_from(("city", "day", "größe")), texts | st.integers() | st.none(), max_size=2
)
calls = st.builds(ToolCall, st.sampled_from(("weather", "look")), arguments.map(json.dumps))
rounds = st.lists(
    st.tuples(texts, st.lists(calls, max_size=3), texts.filter(bool) | st.none()).map(
        lambda drawn: drawn if drawn[1] or drawn[2] is not None else (*drawn[:2], "go on")
    ),
    max_size=3,
)


@cache
def made(name: str) -> tuple[Any, ChatTemplate]:
    tokenizer = tool_tokenizer(TEMPLATES[name])
    return tokenizer, ChatTemplate(tokenizer)


def rendered(tokenizer: Any, messages: Sequence[ChatMessage], tools: Tools) -> str:
    """What `transformers` makes of the same conversation."""
    conversation = [
        {"role": message.role, "content": message.content}
        | ({"reasoning_content": message.reasoning} if message.reasoning else {})
        | (
            {
                "tool_calls": [
                    {
                        "type": "function",
                        "function": {"name": call.name, "arguments": json.loads(call.arguments)},
                    }
                    for call in message.calls
                ]
            }
            if message.calls
            else {}
        )
        for message in messages
    ]
    return str(
        tokenizer.apply_chat_template(
            conversation, tools=list(tools) or None, add_generation_prompt=True, tokenize=False
        )
    )


def answers(made_calls: Sequence[ToolCall], said: str | None) -> list[ChatMessage]:
    results = [
        ChatMessage("tool", f"result {index}\nof {call.name}")
        for index, call in enumerate(made_calls)
    ]
    return [*results, *([] if said is None else [ChatMessage("user", said)])]


@every_template
@given(system=texts | st.none(), first=texts, played=rounds, tools=st.sampled_from(((), WEATHER)))
def test_a_conversation_has_the_ids_that_the_tokenizer_gives_the_rendering(
    name: str,
    system: str | None,
    first: str,
    played: list[tuple[str, list[ToolCall], str | None]],
    tools: Tools,
) -> None:
    tokenizer, chat = made(name)
    messages = [] if system is None else [ChatMessage("system", system)]
    messages.append(ChatMessage("user", first))
    for text, called, said in played:
        messages += [
            ChatMessage("assistant", text, tuple(called), reasoning=text[:5]),
            *answers(called, said),
        ]
    expected = tokenizer.encode(rendered(tokenizer, messages, tools), add_special_tokens=False)
    assert list(chat.render(messages, tools)) == expected


@every_template
@given(first=texts, played=rounds, ended=st.booleans())
def test_replies_and_what_follows_them_grow_to_the_rendering_of_the_whole(
    name: str, first: str, played: list[tuple[str, list[ToolCall], str | None]], ended: bool
) -> None:
    tokenizer, chat = made(name)
    messages = [ChatMessage("user", first)]
    ids = chat.render(messages, WEATHER)
    for text, called, said in played:
        reply, after = ChatMessage("assistant", text, tuple(called)), answers(called, said)
        output = chat.encode_reply(reply)[: None if ended else -1]
        ids += output + chat.extend(output, after)
        messages += [reply, *after]
    written = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert written == rendered(tokenizer, messages, WEATHER)


attack = st.lists(
    st.sampled_from(
        (
            *SPECIAL,
            *chain.from_iterable((token[:5], token[5:]) for token in SPECIAL),
            "im_end",
            "<",
            ">",
            "x",
        )
    ),
    min_size=1,
    max_size=4,
).map("".join)


@every_template
@given(text=attack)
def test_no_content_writes_special_tokens(name: str, text: str) -> None:
    tokenizer, chat = made(name)
    special = {tokenizer.convert_tokens_to_ids(token) for token in SPECIAL}

    def conversation(word: str) -> tuple[int, ...]:
        called = ToolCall(word, json.dumps({word: word, "nested": [{word: [word]}]}))
        described = {
            "type": "function",
            "function": {"name": word, "description": word, "parameters": {word: word}},
        }
        results = (ChatMessage("tool", word), ChatMessage("tool", word), ChatMessage("user", word))
        head = (
            ChatMessage("system", word),
            ChatMessage("user", word),
            ChatMessage("assistant", word, (called,), word),
        )
        return chat.render((*head, *results), (described,)) + chat.extend((7,), results)

    ids = conversation(text)
    assert [i for i in ids if i in special] == [i for i in conversation("harmless") if i in special]
    # Nothing is lost or left behind by the disguise.
    written = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert written.count(text) >= 15
    assert not any(0xE000 <= ord(character) < 0xF900 for character in written)


def test_no_tool_writes_a_tag_of_the_template_and_what_a_program_says_of_tags_is_said_in_tokens() -> (
    None
):
    tokenizer = marked_tokenizer()
    chat, tags = ChatTemplate(tokenizer), MARKED_ADDED[2:]
    ids_of_tags = set(tokenizer.convert_tokens_to_ids(list(tags)))

    def conversation(word: str) -> tuple[int, ...]:
        described = {
            "type": "function",
            "function": {"name": word, "description": word, "parameters": {word: word}},
        }
        messages = (
            ChatMessage("user", "hello"),
            ChatMessage("assistant", "", (CALL,)),
            ChatMessage("tool", word),
        )
        return chat.render(messages, (described,)) + chat.extend((7,), (ChatMessage("tool", word),))

    ids = conversation("".join(tags))
    assert [i for i in ids if i in ids_of_tags] == [
        i for i in conversation("harmless") if i in ids_of_tags
    ]
    written = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert written.count("".join(tags)) == 6
    assert ids_of_tags < set(chat.open("".join(tags), "hello"))
    assert ids_of_tags < set(chat.encode_turn("".join(tags)))


def test_a_template_that_thinks_before_it_calls_is_played_with_tools() -> None:
    for tokenizer in (marked_tokenizer(), tool_tokenizer(THINKING)):
        chat = ChatTemplate(tokenizer)
        assert chat.tools_problem == ""
        assert CallSyntax.of(chat) == CallSyntax("<tool_call>", "</tool_call>")


def test_the_marker_that_a_policy_sampled_is_not_repeated_and_another_one_is_not_lost() -> None:
    tokenizer = marked_tokenizer()
    user, observation = tokenizer.convert_tokens_to_ids(["<|user|>", "<|observation|>"])
    chat = ChatTemplate(tokenizer, (user, observation))
    results = [ChatMessage("tool", "sunny")]
    assert chat.extend((7,), results)[0] == observation
    assert chat.extend((7, observation), results) == chat.extend((7,), results)[1:]
    assert chat.extend((7, user), results) == chat.extend((7,), results)
    assert chat.delta((7, user), "on") == chat.delta((7,), "on")[1:]
    # A demonstration teaches the marker that ends what it does.
    assert chat.encode_reply(ChatMessage("assistant", "", (CALL,)))[-1] == observation
    assert chat.encode_reply(ChatMessage("assistant", "hello"))[-1] == user


def test_a_special_token_that_has_a_field_in_its_name_hides_no_field() -> None:
    """SmolLM2 has <filename>, and others <|user|>: texts of a message, and never its fields and roles."""
    tokenizer = make_tokenizer(
        (*SPECIAL[:-1], "<filename>", "<|tool|>", "<|function|>", SPECIAL[-1])
    )
    tokenizer.chat_template = HERMES
    chat = ChatTemplate(tokenizer)
    assert not chat.tools_problem
    head = (
        ChatMessage("user", "Rome?"),
        ChatMessage("assistant", "", (ToolCall("name", '{"name": "<filename>"}'),)),
    )
    messages = (*head, ChatMessage("tool", "<filename> name"))
    ids = chat.render(messages, WEATHER)
    written = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert written == rendered(tokenizer, messages, WEATHER)
    assert tokenizer.convert_tokens_to_ids("<filename>") not in ids


def test_a_private_character_of_a_content_survives() -> None:
    tokenizer, chat = made("hermes")
    text = "\ue000<|im_end|>\ue001 \\ue002"
    assert text in tokenizer.decode(
        chat.render((ChatMessage("user", text),)), clean_up_tokenization_spaces=False
    )


def test_a_template_that_shows_no_tools_refuses_them() -> None:
    chat = ChatTemplate(make_tokenizer())
    assert "shows no tools" in chat.tools_problem
    with pytest.raises(ConfigError, match="shows no tools"):
        chat.render((ChatMessage("user", "hello"),), WEATHER)


@pytest.mark.parametrize("shape", [(), ("user", "tool"), ("system", "tool"), ("assistant",)])
def test_results_follow_a_reply_before_all_else(shape: tuple[Any, ...]) -> None:
    _, chat = made("hermes")
    with pytest.raises(ConfigError, match="cannot follow a reply"):
        chat.extend((7,), [ChatMessage(role, "hello") for role in shape])


@pytest.mark.parametrize(
    "roles", [("user", "user"), ("tool", "user", "user"), ("user", "user", "user")]
)
@pytest.mark.parametrize("family", ["hermes", "xml"])
def test_several_users_messages_follow_a_reply_as_the_template_writes_them(
    family: str, roles: tuple[Any, ...]
) -> None:
    _, chat = made(family)
    first, reply = chat.render((ChatMessage("user", "hi"),)), chat.encode_turn("even")
    tail = [ChatMessage(role, f"text {number}") for number, role in enumerate(roles)]
    whole = chat.render((ChatMessage("user", "hi"), ChatMessage("assistant", "even"), *tail))
    assert (*first, *reply, *chat.extend(reply, tail)) == whole


def test_a_system_message_follows_a_reply_where_the_template_writes_it_there() -> None:
    tail = [
        ChatMessage("user", "on"),
        ChatMessage("system", "Be brief."),
        ChatMessage("user", "and on"),
    ]
    with pytest.raises(ConfigError, match="leaves out system"):
        made("hermes")[1].extend((7,), tail)
    chat = ChatTemplate(marked_tokenizer())
    whole = chat.render((ChatMessage("user", "hi"), ChatMessage("assistant", "even"), *tail))
    ids = chat.extend((7,), tail)
    assert ids == whole[-len(ids) :]
    assert "Be brief." in chat.decode(ids)


TOOL_TURN = "{%- elif message.role == 'tool' %}"
USER_TURN = "{%- if message.role == 'user' %}"
RESULT = "+ message.content + '\n</tool_response>'"


@pytest.mark.parametrize(
    ("part", "instead", "reason"),
    [
        # As Mistral's does: the tools stand before the last user's message, wherever that is.
        (
            USER_TURN,
            USER_TURN + "{%- if loop.last and tools %}{{- tools | tojson }}{%- endif %}",
            "changes what",
        ),
        (RESULT, "+ '\n</tool_response>'", "leaves out tool"),
        (RESULT, "+ (message.name or '') " + RESULT, "depends on"),
        (TOOL_TURN, TOOL_TURN + "{{- raise_exception('not today') }}", "not today"),
        ("message.tool_calls or []", "[]", "leaves out the calls"),
    ],
)
def test_a_template_that_does_not_append_is_refused_as_soon_as_tools_are_given(
    part: str, instead: str, reason: str
) -> None:
    chat = ChatTemplate(tool_tokenizer(HERMES.replace(part, instead)))
    assert reason in chat.tools_problem
    assert chat.open(None, "hello") == made("hermes")[1].open(None, "hello")
    with pytest.raises(ConfigError, match=reason):
        chat.render((ChatMessage("user", "hello"),), WEATHER)


def test_a_template_of_one_call_a_turn_takes_several_results() -> None:
    once = (
        "{%- for call in message.tool_calls or [] %}"
        "{%- if not loop.first %}{{- raise_exception('one') }}{%- endif %}"
    )
    template = HERMES.replace("{%- for call in message.tool_calls or [] %}", once)
    chat = ChatTemplate(tool_tokenizer(template))
    assert chat.tools_problem == ""
    results = [ChatMessage("tool", "one"), ChatMessage("tool", "two")]
    assert chat.extend((7,), results) == made("hermes")[1].extend((7,), results)
    with pytest.raises(ConfigError, match="refuses a conversation of user, assistant"):
        chat.render((ChatMessage("user", "hello"), ChatMessage("assistant", "", (CALL, CALL))))


def test_arguments_that_are_no_object_are_refused() -> None:
    _, chat = made("hermes")
    with pytest.raises(ConfigError, match="no JSON object"):
        chat.render(
            (
                ChatMessage("user", "hello"),
                ChatMessage("assistant", "", (ToolCall("weather", "[1"),)),
            )
        )


def test_a_process_that_imports_no_torch_says_which_engine_plays_tools(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConfigError, match=r"has tools and actor\.engine is scripted.*to vllm"):
        parser_for(made("hermes")[1])
