import pytest
from hypothesis import given
from hypothesis import strategies as st

from horizonrl.envs.formats import ActionFormat, Unreadable, read_action, write_action

FORMATS: list[ActionFormat] = ["react", "plain"]
LINES = st.text(st.characters(categories=("L", "N", "P", "Zs")), min_size=1).map(str.strip).filter(bool)


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("Thought: I need wood.\nAction: get 1 oak logs", "get 1 oak logs"),
        ("Action:\n\n  inventory  \nand then I look", "inventory"),
        ("I will look. action : inventory", "inventory"),
        ("Action: inventory Thought: what now?", "inventory"),
        ("Thought: a\nAction: b\r\n", "b"),
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


@given(st.text(), st.sampled_from(FORMATS))
def test_any_text_is_one_action_or_unreadable(text: str, action_format: ActionFormat) -> None:
    answer = read_action(text, action_format)
    if isinstance(answer, str):
        assert answer
        assert answer == answer.strip()
        assert len(answer.splitlines()) == 1
        assert answer in text
    else:
        assert answer.reason


@given(LINES, LINES, st.sampled_from(FORMATS))
def test_what_is_written_is_read_back(action: str, thought: str, action_format: ActionFormat) -> None:
    labels = ("action", "thought")
    if not any(label in part.lower() for label in labels for part in (action, thought)):
        assert read_action(write_action(action, thought, action_format), action_format) == action
