"""What AgentGym's clients make of a reply, by their own rules."""

import pytest

from horizonrl.envs.agentgym.dialects import DIALECTS
from horizonrl.envs.formats import Unreadable

TWICE = "Action: get 1 log\nAction: inventory"
PARSED = [
    ("textcraft", "Thought: x\nAction: get 1 oak logs", "get 1 oak logs"),
    (
        "textcraft",
        "Action:\n\n  craft 4 stick using 2 oak_planks!\nand more",
        "craft 4 stick using 2 oakplanks",
    ),
    ("textcraft", "get 1 oak logs", ""),
    ("textcraft", "Action:", ""),
    ("textcraft", "Action: a\tb", "ab"),
    ("textcraft", "Action: Action: a", "Action a"),
    ("babyai", "Action: go to red ball 1</s>", "go to red ball 1s"),
    ("alfworld", f"{TWICE} \n", "inventory"),
    ("alfworld", "Action: go to desk 1\nThen look.</s>", "go to desk 1\nThen look."),
    ("sciworld", "look around", ""),
    ("webshop", "search[red shoes]", "search[red shoes]"),
    ("webshop", "Thought: buy\nAction: click[Buy Now]", "click[Buy Now]"),
    ("maze", TWICE, "get 1 log"),
    ("maze", " move up </s>", "move up"),
    ("wordle", "Action:\ns h i r e", "s h i r e"),
    ("sqlgym", "```sql\nSELECT 1\n```\nor\n```sql\n SELECT 2 ```", "SELECT 2"),
    ("sqlgym", " SELECT 3 ", "SELECT 3"),
    ("webarena", "So ```click [1]``` then ```stop```", "So ```click [1]``` then ```stop```"),
    ("searchqa", " <search>who</search> ", " <search>who</search> "),
    ("weather", "Action: finish with Action Input: {}", "Action: finish with Action Input: {}"),
]


@pytest.mark.parametrize(("name", "text", "action"), PARSED)
def test_an_action_is_read_as_the_original_client_reads_it(
    name: str, text: str, action: str
) -> None:
    assert DIALECTS[name].read(text) == action


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        (
            "textcraft",
            TWICE,
            "Error: Only one 'Action' is allowed per response. Please adjust your response.",
        ),
        (
            "babyai",
            TWICE,
            "Error: Only one 'Action' is allowed per response. Please adjust your response.",
        ),
        ("webarena", "click [1]", "Cannot parse action from response."),
        ("webarena", "```click [1]``", "Cannot parse action from response."),
    ],
)
def test_a_reply_that_the_original_client_answers_itself_is_not_sent(
    name: str, text: str, reason: str
) -> None:
    answer = DIALECTS[name].read(text)
    assert isinstance(answer, Unreadable)
    assert answer.reason.startswith(reason)
