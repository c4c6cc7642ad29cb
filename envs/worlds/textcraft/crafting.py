"""The world of one episode: an inventory, and what the three commands do to it.

    get N ITEM                      finds base items, the ones that no recipe makes
    craft N ITEM using M ITEM, ...  follows one recipe once; the recipe decides how many it makes
    inventory                       lists what the agent carries

Knows nothing about formats, rewards or limits. A command that cannot be followed changes nothing; the answer says why.
"""

import re
from collections.abc import Mapping
from itertools import islice

from horizonrl.envs.formats import Command
from horizonrl.envs.worlds.textcraft.recipes import Recipe, RecipeBook

COMMANDS = (
    Command("get", "get {count} {item}", "find a base item, one that no recipe makes"),
    Command(
        "craft",
        "craft {count} {item} using {ingredients}",
        "follow one recipe once; ingredients as in it",
    ),
    Command("inventory", "inventory", "list what you carry"),
)

MAX_COMMAND_CHARS = 512
"""More than enough: the longest command that a recipe needs has fewer than 100 characters."""
ECHO_CHARS = 60
"""Characters of the agent's own words that an answer quotes."""

# `[0-9]` and not `\d`, which takes the digits of every script.
_GET = re.compile(r"get ([0-9]{1,4}) (.+)")
_CRAFT = re.compile(r"craft (?:[0-9]{1,4} )?(.+?) using (.+)")
_COUNTED = re.compile(r"([0-9]{1,4}) (.+)")


class Crafting:
    """Holds the inventory on the way to one goal; `crafted` turns true when the goal, and nothing like it, is made."""

    def __init__(self, book: RecipeBook, goal: str) -> None:
        self.book = book
        self.goal = goal
        self.crafted = False
        self._inventory: dict[str, int] = {}

    @property
    def inventory(self) -> Mapping[str, int]:
        """What the agent carries, in the order in which it got the items."""
        return self._inventory

    @property
    def state(self) -> str:
        """What the agent holds, in the order of names: nothing else of the world ever changes."""
        return " ".join(
            f"{item}={count}" for item, count in sorted(self._inventory.items()) if count
        )

    def follow(self, command: str) -> str:
        """Follow a command and return what the agent sees."""
        if len(command) > MAX_COMMAND_CHARS:
            return f"Could not execute a command of {len(command)} characters."
        plain = normalize(command)
        if plain == "inventory":
            return self._list_inventory()
        if match := _GET.fullmatch(plain):
            return self._get(int(match[1]), match[2])
        if match := _CRAFT.fullmatch(plain):
            return self._craft(match[1], match[2])
        return f"Could not execute {_clip(plain)!r}."

    def _list_inventory(self) -> str:
        if not self._inventory:
            return "Inventory: You are not carrying anything."
        return "Inventory: " + " ".join(
            f"[{item}] ({count})" for item, count in self._inventory.items()
        )

    def _get(self, count: int, item: str) -> str:
        if item in self.book.members:
            return f"Could not find {item}: {self._name_a_member(item)}"
        if item in self.book.recipes_of:
            return f"Could not find {item}: it must be crafted."
        if item not in self.book.base_items:
            return f"Could not find {_clip(item)}: there is no such item."
        if count == 0:
            return f"Could not get 0 {item}: the least is 1."
        self._add(item, count)
        return f"Got {count} {item}"

    def _craft(self, item: str, ingredients: str) -> str:
        if item not in self.book.recipes_of:
            return f"Could not craft {_clip(item)}: there is no recipe for it."
        paid: dict[str, int] = {}
        for part in ingredients.split(","):
            counted = _COUNTED.fullmatch(part.strip())
            if counted is None:
                return (
                    f"Could not craft {item}: {_clip(part.strip())!r} is not an amount and an item."
                )
            if counted[2] in self.book.members:
                return (
                    f"Could not craft {item} using {counted[2]}: {self._name_a_member(counted[2])}"
                )
            paid[counted[2]] = paid.get(counted[2], 0) + int(counted[1])
        recipe = next(
            (recipe for recipe in self.book.recipes_of[item] if self._pays(paid, recipe)), None
        )
        if recipe is None:
            return f"Could not find a valid recipe for {item}: items and amounts must be exactly those of a recipe."
        for name, count in paid.items():
            if (carried := self._inventory.get(name, 0)) < count:
                return f"Could not find enough items to craft {item}: you have {carried} of {count} {name}."
        for name, count in paid.items():
            self._remove(name, count)
        self._add(item, recipe.count)
        self.crafted = self.crafted or item == self.goal
        return f"Crafted {recipe.count} {item}"

    def _pays(self, paid: Mapping[str, int], recipe: Recipe) -> bool:
        """Return whether the items are exactly a recipe's ingredients, with one kind of item for each."""
        remaining = dict(paid)
        for ingredient in recipe.ingredients:
            fitting = (
                i
                for i in self.book.items_for(ingredient.name)
                if remaining.get(i) == ingredient.count
            )
            if (item := next(fitting, None)) is None:
                return False
            del remaining[item]
        return not remaining

    def _name_a_member(self, tag: str) -> str:
        return f"name a kind of it, such as {' or '.join(islice(self.book.members[tag], 2))}."

    def _add(self, item: str, count: int) -> None:
        self._inventory[item] = self._inventory.get(item, 0) + count

    def _remove(self, item: str, count: int) -> None:
        self._inventory[item] -= count
        if not self._inventory[item]:
            del self._inventory[item]


def normalize(command: str) -> str:
    """Return a command in plain words: lower case, single spaces, without quotes or a final full stop around it."""
    return " ".join(command.lower().replace("_", " ").split()).strip(" .!`'\"*[]()<>")


def _clip(text: str) -> str:
    return text if len(text) <= ECHO_CHARS else text[:ECHO_CHARS] + "..."
