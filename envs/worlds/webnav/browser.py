"""The browser of one episode: tabs with their histories, and the effects of actions on the current page.

It knows nothing about sites. It gets pages from a `Web` and sends it the values of fields.
"""

from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import urljoin, urlsplit

from horizonrl.envs.worlds.webnav.page import (
    VIEWPORT_LINES,
    Element,
    Node,
    Page,
    Style,
    nodes,
    render,
    text,
)

HOME = "http://home/"
MAX_TABS = 8
MAX_TEXT_CHARS = 500


class Web(Protocol):
    """The servers."""

    def get(self, url: str) -> Page:
        """Return the page at an address, or an error page."""

    def post(self, url: str, fields: dict[str, str]) -> tuple[str, str]:
        """Submit the fields of a page; return the address of the next page and a notice to show on it."""


@dataclass(slots=True)
class Tab:
    page: Page
    history: list[str]
    position: int = 0
    values: dict[str, str] = field(default_factory=dict)
    """The present values of the fields."""
    top: int = 0
    """The number of lines by which the page is scrolled down."""
    focus: Element | None = None


class Refused(Exception):
    """The action cannot be taken. The agent reads the message."""


class Browser:
    def __init__(self, web: Web, start: str, style: Style) -> None:
        self._web = web
        self._style: Style = style
        self._tabs = [self._open(start)]
        self._current = 0

    @property
    def tab(self) -> Tab:
        return self._tabs[self._current]

    def observe(self) -> str:
        """Return the visible part of the current page."""
        tab = self.tab
        seen = render(tab.page, self._style, tab.values, tab.top)
        if self._style == "compact":
            return f"{tab.page.title}\n{seen}"
        titles = (
            f"Tab {number}{' (current)' if other is tab else ''}: {other.page.title}"
            for number, other in enumerate(self._tabs)
        )
        return f"{' | '.join(titles)}\nURL: {tab.page.url}\n{seen}"

    def act(self, name: str, arguments: dict[str, str]) -> None:
        """Take an action. Raises Refused, without any change, if it cannot be taken."""
        match name, *arguments.values():
            case "click", number:
                self._click(self._node(number))
            case "type", number, words, enter:
                self._type(self._node(number), words, enter)
            case "hover", number:
                self._node(number)
            case "press", key:
                if key.lower() == "enter" and self.tab.focus is not None:
                    self._enter(self.tab.focus)
            case "scroll", direction:
                self._scroll(direction)
            case "goto", url:
                self._visit(_address(url))
            case ("go_back" | "go_forward",):
                self._move(-1 if name == "go_back" else 1)
            case _, *number:
                self._switch(name, number[0] if number else "")

    def _node(self, number: str) -> Node:
        for node in nodes(self.tab.page, self._style):
            if str(node.number) == number.strip():
                return node
        raise Refused(f"There is no element [{number[:20]}] on the page.")

    def _click(self, node: Node) -> None:
        element = node.element
        if element.role == "link":
            self._visit(urljoin(self.tab.page.url, element.url))
        elif element.role == "button":
            self._send(element)
        elif node.option is not None:
            self.tab.values[element.name] = node.option
        else:
            self.tab.focus = element

    def _type(self, node: Node, words: str, enter: str) -> None:
        if node.element.role != "textbox":
            raise Refused(f"Element [{node.number}] is a {node.element.role}, not a textbox.")
        if len(words) > MAX_TEXT_CHARS or enter not in ("0", "1"):
            raise Refused(
                f"A text has at most {MAX_TEXT_CHARS} characters; the last argument is 0 or 1."
            )
        self.tab.values[node.element.name] = words
        self.tab.focus = node.element
        if enter == "1":
            self._enter(node.element)

    def _enter(self, field: Element) -> None:
        """Press the first button after a field."""
        elements = self.tab.page.elements
        after = elements[elements.index(field) :]
        if button := next((element for element in after if element.role == "button"), None):
            self._send(button)

    def _send(self, button: Element) -> None:
        url, notice = self._web.post(urljoin(self.tab.page.url, button.url), dict(self.tab.values))
        self._visit(url)
        if notice:
            page = self.tab.page
            self.tab.page = Page(page.url, page.title, (text(notice), *page.elements))

    def _scroll(self, direction: str) -> None:
        if direction not in ("down", "up"):
            raise Refused("Scroll [down] or [up].")
        tab, by = self.tab, VIEWPORT_LINES[self._style]
        last = max(0, sum(1 for _ in nodes(tab.page, self._style)) - by)
        tab.top = min(tab.top + by, last) if direction == "down" else max(tab.top - by, 0)

    def _open(self, url: str) -> Tab:
        page = self._web.get(url)
        return Tab(page, [url], values=page.fields())

    def _visit(self, url: str) -> None:
        tab, opened = self.tab, self._open(url)
        # A new page drops what `go_forward` would have reached, as in any browser.
        opened.history = [*tab.history[: tab.position + 1], url]
        opened.position = tab.position + 1
        self._tabs[self._current] = opened

    def _move(self, by: int) -> None:
        tab = self.tab
        if not 0 <= tab.position + by < len(tab.history):
            raise Refused(f"There is no page {'before' if by < 0 else 'after'} this one.")
        opened = self._open(tab.history[tab.position + by])
        opened.history, opened.position = tab.history, tab.position + by
        self._tabs[self._current] = opened

    def _switch(self, name: str, number: str) -> None:
        if name == "new_tab" and len(self._tabs) < MAX_TABS:
            self._tabs.append(self._open(HOME))
            self._current = len(self._tabs) - 1
        elif name == "close_tab" and len(self._tabs) > 1:
            del self._tabs[self._current]
            self._current = max(0, self._current - 1)
        elif name == "tab_focus" and number in map(str, range(len(self._tabs))):
            self._current = int(number)
        else:
            raise Refused(
                f"There are {len(self._tabs)} tabs; the most is {MAX_TABS}, the least is 1."
            )


def _address(written: str) -> str:
    """Return a complete address. Raises Refused for an invalid one."""
    url = written if "://" in written else f"http://{written}"
    try:
        urlsplit(url)
    except ValueError:  # of a bracket in a host
        url = ""
    if not 0 < len(url) <= MAX_TEXT_CHARS:
        raise Refused("This is no address. One is http://home/ which lists the sites.")
    return url
