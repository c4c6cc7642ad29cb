"""The expert: one strategy per page, which uses only what the agent reads."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from horizonrl.common.errors import EnvironmentFailure
from horizonrl.envs.game import Move

_NODE = re.compile(
    r"\t?\[(\d+)\] (\w+) '(.*?)'(?: value: '(.*)')?(?: (?:checked|selected): (True|False))?(?: dis.*)?"
)
_QUOTED = re.compile(r'"([^"]*)"')
_ORDINAL = re.compile(r"(\d+)(?:st|nd|rd|th)")
_SECTION = re.compile(r"(?:Tab|Section) #\d+")
_ARITHMETIC = re.compile(r"(\d+) ([-+x]) (\d+) =")
_ALGEBRA = re.compile(r"(x|\d+) ([-+]) (x|\d+) = (-?\d+)")
_SELECT = re.compile(r"Select (.*?)(?: from the (?:scroll )?list)? and click Submit\.")
_FEEDBACK = re.compile(r"(lower|higher) than (\d)")


@dataclass(frozen=True, slots=True)
class Node:
    number: str
    kind: str
    name: str
    value: str
    """Of a field; empty when it has none."""
    on: bool
    """A box that is checked, or an option of a list of many that is selected."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What an expert knows: the task's words, the page, and the number of its actions so far."""

    query: str
    nodes: Sequence[Node]
    texts: Sequence[str]
    turn: int
    answers: Sequence[str]
    """The feedback of the page so far, one text per observation."""

    @property
    def quoted(self) -> list[str]:
        return _QUOTED.findall(self.query)

    def find_by_name(self, name: str) -> Node:
        for node in self.nodes:
            if node.name == name:
                return node
        raise LookupError(name)

    def of_kind(self, *kinds: str) -> list[Node]:
        return [node for node in self.nodes if node.kind in kinds]


def read_page(observation: str) -> tuple[list[Node], list[str]]:
    """Return an observation's elements and its texts."""
    nodes, texts = [], []
    for line in observation.splitlines():
        if match := _NODE.fullmatch(line):
            number, kind, name, value, on = match.groups()
            nodes.append(Node(number, kind, name, value or "", on == "True"))
        else:
            texts.append(line)
    return nodes, texts


class PageExpert:
    """Begins where the page does."""

    def __init__(self, page: str, query: str) -> None:
        self._strategy = STRATEGIES[page]
        self._query = query
        self._observations: list[str] = []

    def advise(self, observation: str) -> Move:
        """Return the move of the page's strategy."""
        # The first observation begins with the rules.
        nodes, texts = read_page(observation.rpartition(self._query)[2])
        seen = Seen(
            self._query,
            nodes,
            texts,
            len(self._observations),
            (*self._observations, " ".join(texts)),
        )
        self._observations.append(" ".join(texts))
        try:
            return self._strategy(seen)
        except (LookupError, TypeError, AttributeError) as error:
            raise EnvironmentFailure(
                f"the expert does not know this page: {observation[:200]!r}"
            ) from error


Strategy = Callable[[Seen], Move]


def click(node: Node) -> Move:
    return Move(f"click [{node.number}]", f"I click {node.name or node.kind}.")


def type_into(node: Node, text: str, *, enter: bool = False) -> Move:
    return Move(f"type [{node.number}] [{text}] [{int(enter)}]", f"I type {text}.")


def click_name(name: Callable[[Seen], str]) -> Strategy:
    """Click the element whose name follows from the task's words."""
    return lambda seen: click(seen.find_by_name(name(seen)))


def click_kind(kind: Callable[[Seen], str]) -> Strategy:
    return lambda seen: click(seen.of_kind(kind(seen))[0])


def fill(values: Callable[[Seen], Sequence[str]]) -> Strategy:
    """Cancel a popup if there is one, fill the fields in order, and press the button."""

    def strategy(seen: Seen) -> Move:
        if popup := [node for node in seen.of_kind("button") if node.name == "Cancel"]:
            return click(popup[0])
        for node, value in zip(seen.of_kind("textbox"), values(seen), strict=False):
            if node.value != value:
                return type_into(node, value)
        return click(seen.of_kind("button")[-1])

    return strategy


def select(seen: Seen) -> Move:
    """Switch on the boxes and options that the task names, and press the button."""
    wanted = _SELECT.fullmatch(seen.query)[1].split(", ")  # type: ignore[index]
    lists = [node.value for node in seen.of_kind("combobox")]
    for node in seen.of_kind("checkbox", "radio", "menuitem"):
        if node.name in wanted and not node.on and node.name not in lists:
            return click(node)
    return click(seen.of_kind("button")[-1])


def search(seen: Seen) -> Move:
    """Open the tabs or sections one after another until the link appears."""
    links = [node for node in seen.of_kind("link") if node.name == seen.quoted[0]]
    sections = [node for node in seen.of_kind("tab") if _SECTION.fullmatch(node.name)]
    return click(links[0] if links else sections[seen.turn % len(sections)])


def guess(seen: Seen) -> Move:
    """Search 0 to 9 by bisection, using the feedback."""
    low, high = 0, 9
    for answer in seen.answers:
        for side, number in _FEEDBACK.findall(answer):
            low, high = (low, int(number) - 1) if side == "lower" else (int(number) + 1, high)
    return type_into(seen.of_kind("textbox")[0], str((low + high) // 2), enter=True)


def mark(seen: Seen) -> Move:
    """Mark the numbers in turn as odd or even."""
    numbers = [int(text) for text in seen.texts if text.lstrip("-").isdigit()]
    if seen.turn == len(numbers):
        return click(seen.of_kind("button")[-1])
    name = "Odd" if numbers[seen.turn] % 2 else "Even"
    return click([node for node in seen.of_kind("button") if node.name == name][seen.turn])


def upper_or_lower(seen: Seen) -> list[str]:
    word = seen.quoted[0]
    return [word.upper() if "upper" in seen.query else word.lower()]


def value_in_table(seen: Seen) -> list[str]:
    key = re.sub(r"^Enter the value of | into the text field.*$", "", seen.query)
    return [seen.texts[list(seen.texts).index(key) + 1]]


def word_of_paragraph(seen: Seen) -> list[str]:
    paragraph = max(seen.texts, key=len)
    return [re.sub(r"[^a-zA-Z0-9]", "", paragraph.split()[ordinal(seen) - 1])]


def ordinal(seen: Seen) -> int:
    return int(_ORDINAL.findall(seen.query)[0])


def result(seen: Seen) -> list[str]:
    one, sign, other = _ARITHMETIC.search("\n".join(seen.texts)).groups()  # type: ignore[union-attr]
    return [
        str(
            {"+": int(one) + int(other), "-": int(one) - int(other), "x": int(one) * int(other)}[
                sign
            ]
        )
    ]


def unknown(seen: Seen) -> list[str]:
    one, sign, other, total = _ALGEBRA.search("\n".join(seen.texts)).groups()  # type: ignore[union-attr]
    if sign == "+":
        return [str(int(total) - int(other if one == "x" else one))]
    return [str(int(total) + int(other) if one == "x" else int(one) - int(total))]


_WIDGETS = {"text": "textbox"}
"""Roles whose name differs from the widget's."""
_named: Strategy = click_name(lambda seen: seen.quoted[0])
_copied: Strategy = fill(lambda seen: seen.quoted)

STRATEGIES: Mapping[str, Strategy] = {
    "choose-list": select,
    "click-button": _named,
    "click-button-sequence": click_name(
        lambda seen: re.findall(r"button (\w+)", seen.query)[seen.turn]
    ),
    "click-checkboxes": select,
    "click-checkboxes-large": select,
    "click-collapsible-2-nodelay": search,
    "click-collapsible-nodelay": lambda seen: click(
        [*seen.of_kind("tab"), *seen.of_kind("button")][seen.turn]
    ),
    "click-dialog": click_kind(lambda seen: "button"),
    "click-dialog-2": click_name(lambda seen: seen.quoted[0].replace("x", "Close")),
    "click-link": _named,
    "click-option": select,
    "click-scroll-list": select,
    "click-tab": click_name(lambda seen: seen.query.removeprefix("Click on ").strip(".")),
    "click-tab-2-easy": search,
    "click-test": click_kind(lambda seen: "button"),
    "click-test-2": click_name(lambda seen: "ONE"),
    "click-widget": click_kind(lambda seen: _WIDGETS.get(seen.quoted[0], seen.quoted[0])),
    "enter-password": fill(lambda seen: seen.quoted * 2),
    "enter-text": _copied,
    "enter-text-2": fill(upper_or_lower),
    "enter-text-dynamic": _copied,
    "find-word": fill(word_of_paragraph),
    "focus-text": click_kind(lambda seen: "textbox"),
    "focus-text-2": lambda seen: click(seen.of_kind("textbox")[ordinal(seen) - 1]),
    "guess-number": guess,
    "login-user": _copied,
    "login-user-popup": _copied,
    "odd-or-even": mark,
    "read-table": fill(value_in_table),
    "simple-algebra": fill(unknown),
    "simple-arithmetic": fill(result),
    "unicode-test": _named,
}
