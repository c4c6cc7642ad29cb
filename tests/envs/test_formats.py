import pytest
from hypothesis import given
from hypothesis import strategies as st

from horizonrl.envs.api import Reply, ToolCall
from horizonrl.envs.formats import (
    ActionFormat,
    Command,
    Unreadable,
    explain,
    make_tools,
    read_action,
    read_call,
    write_reply,
)

FORMATS: list[ActionFormat] = ["react", "plain", "function", "code"]
COMMANDS = (
    Command("look", "look around", "see the room"),
    Command("put", "put {thing} in {place}", "lay something down"),
)
LINES = (
    st.text(st.characters(categories=("L", "N", "P", "Zs")), min_size=1).map(str.strip).filter(bool)
)


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("Thought: I need wood.\nAction: get 1 oak logs", "get 1 oak logs"),
        ("Action:\n\n  inventory  \nand then I look", "inventory"),
        ("I will look. action : inventory", "inventory"),
        ("Action: inventory Thought: what now?", "inventory"),
        ("Thought: a\nAction: b\r\n", "b"),
        ("Thought: The reaction: salt. The transaction : none.\nAction: mix", "mix"),
        ("**Thought:** a\n**Action:** mix", "** mix"),
        ("_Action_: look\n_action: mix", "mix"),
        ("Action: ask about the afterthought: mix", "ask about the afterthought: mix"),
        ("2Action: mix 3Thought: so", "mix 3"),
    ],
)
def test_react_takes_the_first_line_after_action(text: str, action: str) -> None:
    assert read_action(text, "react") == action


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("get 1 oak logs", 'There is no "Action:"'),
        ("Thought: hm\nAction:\n", 'There is nothing after "Action:"'),
        ("Action: a\nAction: b\nAction: c", "There are 3 actions"),
        ("", 'There is no "Action:"'),
    ],
)
def test_react_without_exactly_one_action_says_so(text: str, reason: str) -> None:
    answer = read_action(text, "react")
    assert isinstance(answer, Unreadable)
    assert answer.reason.startswith(reason)


def test_plain_takes_the_first_line_that_is_not_empty() -> None:
    assert read_action("\n  get 1 stick \nget 2 stick", "plain") == "get 1 stick"
    assert isinstance(read_action(" \n\t", "plain"), Unreadable)


CALLS = [
    ("function", '{"thought": "hm", "function_name": "look", "arguments": {}}', "look around"),
    (
        "function",
        'So: {"function_name": "put", "arguments": {"thing": "a  cup", "place": 3}} Done.',
        "put a cup in 3",
    ),
    ("code", "```python\n# it is late\nlook()\n```", "look around"),
    ("code", "So:\n```\nput('a cup', place='box')\n```", "put a cup in box"),
    ("code", '```py\nput(place=-2, thing="""a\ncup""")\n```', "put a cup in -2"),
]
NO_CALLS = [
    ("function", "look around", "There is no JSON object"),
    ("function", '{"function_name": "look", "arguments": []}', 'The object needs "function_name"'),
    ("function", "{" * 5000 + "}" * 5000, "There is no JSON object"),
    (
        "function",
        '{"function_name": "leave"}',
        "There is no function 'leave'. There are: look, put.",
    ),
    (
        "function",
        '{"function_name": "put", "arguments": {"thing": "a"}}',
        "The arguments of put are: thing, place.",
    ),
    (
        "function",
        '{"function_name": "put", "arguments": {"thing": [1], "place": 2}}',
        "The arguments of put are texts",
    ),
    ("code", "look()", "There are 0 Python blocks"),
    ("code", "```\nlook()\n```\n```\nlook()\n```", "There are 2 Python blocks"),
    ("code", "```\nlook(\n```", "The block is not Python"),
    ("code", "```\n" + "(" * 3000 + "\n```", "The block is not Python"),
    ("code", "```\nlook()\nlook()\n```", "The block is not one call"),
    ("code", "```\nimport os\n```", "The block is not one call"),
    ("code", "```\n__import__('os').system('true')\n```", "The block is not one call"),
    ("code", "```\nput(open('x'), place='\\d')\n```", "An argument of put is no literal"),
    ("code", "```\nput(1, 2, 3)\n```", "put takes 2 arguments"),
    ("code", "```\nput(**{'thing': 1, 'place': 2})\n```", "put takes 2 arguments"),
]


@pytest.mark.parametrize(("action_format", "text", "action"), CALLS)
def test_a_call_is_read_as_the_words_of_its_command(
    action_format: ActionFormat, text: str, action: str
) -> None:
    assert read_action(text, action_format, COMMANDS) == action


@pytest.mark.parametrize(("action_format", "text", "reason"), NO_CALLS)
def test_what_is_not_one_call_of_a_known_function_says_so(
    action_format: ActionFormat, text: str, reason: str
) -> None:
    answer = read_action(text, action_format, COMMANDS)
    assert isinstance(answer, Unreadable)
    assert answer.reason.startswith(reason)


def test_every_format_is_explained_and_calls_name_their_functions() -> None:
    for action_format in FORMATS:
        explained = explain(action_format, COMMANDS)
        assert ("put(thing, place): lay something down" in explained) == (
            action_format in ("function", "code")
        )


def test_an_action_of_no_command_cannot_be_written_as_a_call() -> None:
    with pytest.raises(ValueError, match="no command has the words of 'sing'"):
        write_reply("sing", "", "code", COMMANDS)


@given(st.text(), st.sampled_from(FORMATS))
def test_any_text_is_one_action_or_unreadable(text: str, action_format: ActionFormat) -> None:
    answer = read_action(text, action_format, COMMANDS)
    if isinstance(answer, str):
        assert answer
        assert answer == answer.strip()
        assert len(answer.splitlines()) == 1
        assert answer in text
    else:
        assert answer.reason


@given(LINES, LINES, st.sampled_from(["react", "plain"]))
def test_what_is_written_is_read_back(
    action: str, thought: str, action_format: ActionFormat
) -> None:
    labels = ("action", "thought")
    if not any(label in part.lower() for label in labels for part in (action, thought)):
        assert (
            read_action(write_reply(action, thought, action_format).text, action_format) == action
        )


@given(LINES, LINES, LINES, st.sampled_from(["function", "code"]))
def test_a_call_that_is_written_is_read_back(
    thing: str, place: str, thought: str, action_format: ActionFormat
) -> None:
    action = " ".join(f"put {thing} in {place}".split())
    if "```" not in action + thought:
        assert (
            read_action(
                write_reply(action, thought, action_format, COMMANDS).text, action_format, COMMANDS
            )
            == action
        )


def test_a_call_of_a_tool_fills_the_words_of_a_command() -> None:
    call = ToolCall("put", '{"thing": "a  cup", "place": 3}')
    assert read_call(call, COMMANDS) == "put a cup in 3"
    reply = write_reply("put a cup in 3", "It belongs there.", "native", COMMANDS)
    assert reply == Reply(
        "It belongs there.", (ToolCall("put", '{"thing": "a cup", "place": "3"}'),)
    )
    assert write_reply("look around", "Hm.", "react", COMMANDS) == Reply(
        "Thought: Hm.\nAction: look around"
    )


@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    [
        ("leave", "{}", "There is no function 'leave'. There are: look, put."),
        ("put", "{}", "The arguments of put are: thing, place."),
        ("put", "[]", "The arguments of a call are a JSON object"),
        ("put", "{" * 9_000, "The arguments of a call are a JSON object"),
        ("look", '{"a": ' + "1" * 10_000 + "}", "The arguments of a call are a JSON object"),
        ("put", '{"thing": null, "place": 1}', "The arguments of put are texts"),
    ],
)
def test_a_call_that_fits_no_command_says_so(name: str, arguments: str, reason: str) -> None:
    answer = read_call(ToolCall(name, arguments), COMMANDS)
    assert isinstance(answer, Unreadable)
    assert answer.reason.startswith(reason)


def test_a_reply_without_a_call_names_no_action() -> None:
    assert isinstance(read_action("look around", "native", COMMANDS), Unreadable)


def test_commands_are_described_as_tools() -> None:
    look, put = (tool["function"] for tool in make_tools(COMMANDS))
    assert look["parameters"] == {"type": "object", "properties": {}, "required": []}
    assert put["parameters"]["required"] == ["thing", "place"]
    assert put["description"] == "lay something down"
