"""A page as an agent reads it: the accessibility tree, one line per node, in WebArena's notation or a terse one.

    [1] RootWebArea 'Review of Red Mug' focused: True
      [2] link 'My Orders'
      [3] textbox 'Title' required: False
      [4] combobox 'Stars' value: '5'
        [5] menuitem '1'

An indentation is a tab. The compact style has no root, and numbers only what can be used.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

Style = Literal["full", "compact"]

VIEWPORT_LINES = {"full": 40, "compact": 14}
"""Lines of a page that are visible at once."""
MAX_NAME_CHARS = 80
"""Length limit of names on a page, because an agent may have written them."""


@dataclass(frozen=True, slots=True)
class Element:
    role: str
    """StaticText, link, button, textbox or combobox."""
    name: str
    url: str = ""
    """Where a link leads; where a button sends the page's fields."""
    value: str = ""
    """What a field holds when the page is opened."""
    options: tuple[str, ...] = ()


def text(words: str) -> Element:
    return Element("StaticText", words)


def link(name: str, url: str) -> Element:
    return Element("link", name, url)


def button(name: str, url: str) -> Element:
    return Element("button", name, url)


def textbox(name: str, value: str = "") -> Element:
    return Element("textbox", name, value=value)


def combobox(name: str, options: tuple[str, ...], value: str) -> Element:
    return Element("combobox", name, value=value, options=options)


@dataclass(frozen=True, slots=True)
class Page:
    url: str
    title: str
    elements: tuple[Element, ...]

    def fields(self) -> dict[str, str]:
        """Return what the fields hold when the page is opened."""
        return {
            element.name: element.value
            for element in self.elements
            if element.role in ("textbox", "combobox")
        }


@dataclass(frozen=True, slots=True)
class Node:
    """A line of the tree: an element, or one option of a combobox."""

    element: Element
    option: str | None
    number: int | None
    """The number by which the agent refers to the node. Texts of the compact style have none."""

    def line(self, style: Style, value: str) -> str:
        """Return the node's line if its field has the value `value`."""
        element = self.element
        if self.option is not None:
            return f"\t[{self.number}] menuitem '{self.option}'"
        if self.number is None:
            return _clip(element.name)
        described = f"[{self.number}] {element.role} '{_clip(element.name)}'"
        if element.role == "textbox" and style == "full":
            described += " required: False"
        return f"{described} value: '{_clip(value)}'" if value else described


def nodes(page: Page, style: Style) -> Iterator[Node]:
    """Yield the page's lines in order, below its root."""
    number = 1 if style == "full" else 0
    for element in page.elements:
        for option in (None, *element.options):
            numbered = style == "full" or element.role != "StaticText"
            number += numbered
            yield Node(element, option, number if numbered else None)


def render(page: Page, style: Style, values: Mapping[str, str], top: int) -> str:
    """Return the visible part of a page that is scrolled down by `top` lines."""
    shown = VIEWPORT_LINES[style]
    every = list(nodes(page, style))
    lines = [
        node.line(style, values.get(node.element.name, "")) for node in every[top : top + shown]
    ]
    if style == "full":
        lines = [f"[1] RootWebArea '{page.title}' focused: True", *(f"\t{line}" for line in lines)]
    if top:
        lines.insert(0, f"({top} lines above: scroll [up])")
    if (below := len(every) - top - shown) > 0:
        lines.append(f"({below} lines below: scroll [down])")
    return "\n".join(lines)


def _clip(words: str) -> str:
    return words if len(words) <= MAX_NAME_CHARS else words[:MAX_NAME_CHARS] + "..."
