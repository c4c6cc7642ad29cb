"""Shop: find the product that a customer wishes for, choose its options and buy it. Shaped like WebShop.

The reward comes at Buy Now: the share of the wished attributes, options and price that the purchase meets.
"""

import re
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain, count

from horizonrl.envs.api import Step, TaskSpec
from horizonrl.envs.formats import Command
from horizonrl.envs.game import GameEnvironment, Move, random_for, refuse_move
from horizonrl.envs.splits import lowest_hashes, split_tasks
from horizonrl.envs.text_limits import clip
from horizonrl.envs.worlds.deepsearch.index import Index
from horizonrl.envs.worlds.shop.catalogue import (
    Product,
    Wish,
    load_products,
    load_shelves,
    make_wish,
    parse_category,
)

COMMANDS = (
    Command("search", "search[{keywords}]", "search the shop; only from the search page"),
    Command(
        "click", "click[{button}]", "click a button of the page, named as it stands in brackets"
    ),
)
TRAIN, TEST = 3_930, 200
MOST_RESULTS = 50
"""Products that a search finds at most."""
ON_A_PAGE = {"full": 10, "compact": 5, "agentgym": 10}

BACK, NEXT, PREVIOUS, BUY, DESCRIPTION = (
    "Back to Search",
    "Next >",
    "< Prev",
    "Buy Now",
    "Description",
)
_ACTION = re.compile(r"(search|click)\[(.*)\]", re.IGNORECASE)


@dataclass
class Visit:
    """One customer in the shop: on the search page, on a page of results, or at a product."""

    wish: Wish
    shelves: Index
    page_size: int
    results: list[Product] | None = None
    """What a search has found; None on the search page."""
    page_number: int = 0
    product: Product | None = None
    chosen: dict[str, str] = field(default_factory=dict)

    def follow(self, action: str) -> Step:
        """Follow a search or a click."""
        if (match := _ACTION.search(action)) is None:
            return refuse_move(f"Write search[keywords] or click[button].\n{self.page()}")
        verb, word = match[1].lower(), match[2].strip()
        if verb == "search":
            if self.results is not None:
                return refuse_move(f"You can search from the search page only.\n{self.page()}")
            return refuse_move(self._search(word))
        button = next((button for button in self.buttons() if button.lower() == word.lower()), None)
        if button is None:
            return refuse_move(f"There is no button {clip(word)!r} here.\n{self.page()}")
        if button == BUY and self.product:
            score = self.wish.score(self.product, self.chosen)
            return Step(
                f"You bought {self.product.number}.",
                reward=score,
                terminated=True,
                success=score == 1,
            )
        self._click(button)
        description = (
            f"\n{self.product.description}" if button == DESCRIPTION and self.product else ""
        )
        return refuse_move(self.page() + description)

    def buttons(self) -> list[str]:
        """Return what can be clicked here."""
        if self.results is None:
            return []
        if self.product:
            values = [value for values in self.product.options.values() for value in values]
            return [BACK, PREVIOUS, DESCRIPTION, BUY, *values]
        last = (self.page_number + 1) * self.page_size >= len(self.results)
        turning = [PREVIOUS] * (self.page_number > 0) + [NEXT] * (not last)
        return [BACK, *turning, *(product.number for product in self._current_page())]

    def page(self) -> str:
        """Return the page as text, buttons in brackets."""
        if self.results is None:
            return f"Wish: {self.wish}\n[Search]"
        if self.product is None:
            lines = [f"[{p.number}] {p.title}, ${p.price:.2f}" for p in self._current_page()]
            turning = [button for button in self.buttons() if button in (BACK, PREVIOUS, NEXT)]
            links = "".join(f"[{button}] " for button in turning)
            head = f"{links}Page {self.page_number + 1}, {len(self.results)} results"
            return "\n".join([head, *lines])
        product = self.product
        options = [
            f"{name}: {' '.join(f'[{value}]' for value in values)}"
            + (f" chosen: {self.chosen[name]}" if name in self.chosen else "")
            for name, values in product.options.items()
        ]
        head = f"[{BACK}] [{PREVIOUS}] [{DESCRIPTION}] [{BUY}]"
        return "\n".join([head, f"{product.title}, ${product.price:.2f}", *options])

    def _search(self, keywords: str) -> str:
        pages = self.shelves.search(keywords, MOST_RESULTS)
        self.results, self.page_number = [load_products()[page.alias] for page in pages], 0
        return self.page()

    def _current_page(self) -> list[Product]:
        return (self.results or [])[self.page_number * self.page_size :][: self.page_size]

    def _click(self, button: str) -> None:
        product = self.product
        if button == BACK:
            self.results, self.product, self.chosen = None, None, {}
        elif product is None and button in (NEXT, PREVIOUS):
            self.page_number += 1 if button == NEXT else -1
        elif button == PREVIOUS:
            self.product, self.chosen = None, {}
        elif product is None:
            self.product = load_products()[button]
        elif button != DESCRIPTION:
            self.chosen[
                next(name for name, values in product.options.items() if button in values)
            ] = button

    def advise(self) -> Move:
        """Search for the wish, turn pages to the first product that meets it, choose its options, buy it."""
        if self.results is None:
            wished = f"{' '.join(self.wish.attributes)} {self.wish.kind}"
            return Move(f"search[{wished}]", f"I look for a {wished}.")
        meets = [n for n, product in enumerate(self.results) if self._meets(product)]
        if self.product is None and meets:
            page, number = meets[0] // self.page_size, self.results[meets[0]].number
            if page != self.page_number:
                return Move(
                    f"click[{NEXT if page > self.page_number else PREVIOUS}]",
                    "The right one is not on this page.",
                )
            return Move(f"click[{number}]", f"{number} could be the right one.")
        if self.product is None or not self._meets(self.product):
            return Move(f"click[{BACK}]", "This is not what I look for.")
        for name, value in self.wish.options.items():
            if self.chosen.get(name) != value:
                return Move(f"click[{value}]", f"The {name} has to be {value}.")
        return Move(f"click[{BUY}]", "All is as wished.")

    def _meets(self, product: Product) -> bool:
        offered = all(
            value in product.options.get(name, ()) for name, value in self.wish.options.items()
        )
        return offered and self.wish.score(product, self.wish.options) == 1


class Shop(GameEnvironment[Visit]):
    """One visit at a time.

    format: how the agent names its action (envs/formats.py)
    style: `compact` shows five results a page instead of ten, and no sentences about the rules
    max_observation_chars: bound of every observation
    """

    env_id = "shop"
    version = "2"
    commands = COMMANDS

    @classmethod
    def tasks(cls) -> Sequence[TaskSpec]:
        """Return the 4,130 wishes."""
        return _tasks()

    def load(self) -> None:
        """Build the index and list the tasks, once in a program."""
        load_shelves()
        _wishes()

    def begin(self, task_id: str) -> tuple[str, Visit]:
        """Return the search page with the wish."""
        wish = self.find(_wishes(), task_id)
        visit = Visit(wish, load_shelves(), ON_A_PAGE[self._style])
        rules = "Find what the customer wishes, choose its options and buy it."
        return self.introduce(rules, visit.page()), visit


@cache
def _tasks() -> tuple[TaskSpec, ...]:
    wishes = _wishes()
    categories = {name: parse_category(wish.kind) for name, wish in wishes.items()}
    goals = {name: wish.meaning for name, wish in wishes.items()}
    return split_tasks(categories, lowest_hashes(wishes, TEST), goals)


@cache
def _wishes() -> dict[str, Wish]:
    """Return the wish of every task. A train task whose wish is also a test task's draws another."""
    names = [f"shop-{number:04d}" for number in range(TRAIN + TEST)]
    held_out = {name: make_wish(random_for(name)) for name in lowest_hashes(names, TEST)}
    taken = {wish.meaning for wish in held_out.values()}
    return {name: held_out.get(name) or _other_wish(name, taken) for name in names}


def _other_wish(name: str, taken: Container[object]) -> Wish:
    names = chain([name], (f"{name}/{attempt}" for attempt in count(1)))
    return next(
        wish for wish in map(make_wish, map(random_for, names)) if wish.meaning not in taken
    )
