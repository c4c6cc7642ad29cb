"""The expert: plans from the inventory as it is, so it can take over in the middle of any episode.

A plan settles on one recipe for each item and one member for each tag. Among all such choices the search finds one
with the fewest turns: every base item is found in a single `get`, every use of a recipe is one `craft`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from horizonrl.envs.game import Move
from horizonrl.envs.worlds.textcraft.crafting import Crafting
from horizonrl.envs.worlds.textcraft.recipes import Recipe, RecipeBook

Choices = dict[str, str | Recipe]
"""Per tag the member, and per item of several recipes the recipe, that a plan settles on."""


@dataclass(slots=True)
class Plan:
    """What to get and then what to craft, in order. `undecided` names the choice that stopped an unfinished plan."""

    gets: dict[str, int] = field(default_factory=dict)
    crafts: list[tuple[Recipe, str]] = field(default_factory=list)
    """Each recipe with its command, where members stand for tags."""
    undecided: str | None = None

    @property
    def turns(self) -> int:
        return len(self.gets) + len(self.crafts)


def next_move(world: Crafting) -> Move:
    """Return the first move of a shortest plan from the state of the world."""
    plan = shortest_plan(world.book, world.goal, world.inventory)
    for item, count in plan.gets.items():
        return Move(f"get {count} {item}", f"I need {count} {item}.")
    recipe, command = plan.crafts[0]
    last = recipe.item == world.goal
    return Move(command, "I have all I need." if last else f"I need {recipe.item} first.")


@cache
def recipes_needed(book: RecipeBook, goal: str) -> tuple[Recipe, ...]:
    """Return the recipes of a shortest plan from an empty inventory, each once."""
    return tuple(dict.fromkeys(recipe for recipe, _ in shortest_plan(book, goal, {}).crafts))


def shortest_plan(book: RecipeBook, goal: str, inventory: Mapping[str, int]) -> Plan:
    """Return a plan with the fewest turns that crafts the goal (branch and bound over the open choices)."""
    best: Plan | None = None
    open_choices: list[Choices] = [{}]
    while open_choices:
        choices = open_choices.pop()
        plan = _Draft(book, choices, inventory).plan(goal)
        if best is not None and plan.turns >= best.turns:
            continue  # An unfinished plan only grows.
        if (name := plan.undecided) is None:
            best = plan
        else:
            options: tuple[str | Recipe, ...] = book.members.get(name) or book.recipes_of[name]
            # A stack: reversed, so that the first option is tried first and wins a tie.
            open_choices.extend({**choices, name: option} for option in reversed(options))
    assert best is not None, "without cycles, some choice reaches every item of the book"
    return best


class _Undecided(Exception):
    """The plan needs a choice that has not been made."""


class _Draft:
    """Follows the recipes from the goal down under some choices, on paper."""

    def __init__(self, book: RecipeBook, choices: Choices, inventory: Mapping[str, int]) -> None:
        self._book = book
        self._choices = choices
        self._stock = dict(inventory)
        self._plan = Plan()

    def plan(self, goal: str) -> Plan:
        """Return the whole plan, or the part before the first undecided choice."""
        self._stock.pop(goal, None)  # The goal counts when it is crafted, not when it is carried.
        try:
            self._supply(goal, 1)
        except _Undecided as undecided:
            self._plan.undecided = str(undecided)
        return self._plan

    def _supply(self, item: str, count: int) -> None:
        """Take items from the stock, and get or craft what is short."""
        carried = self._stock.get(item, 0)
        self._stock[item] = max(carried - count, 0)
        short = count - carried
        if short <= 0:
            return
        if item in self._book.base_items:
            self._plan.gets[item] = self._plan.gets.get(item, 0) + short
            return
        recipe = self._recipe(item)
        paid = [
            (ingredient.count, self._member(ingredient.name)) for ingredient in recipe.ingredients
        ]
        uses = -(-short // recipe.count)
        for ingredient_count, name in paid:
            self._supply(name, uses * ingredient_count)
        command = f"craft {recipe.count} {item} using {', '.join(f'{count} {name}' for count, name in paid)}"
        self._plan.crafts.extend([(recipe, command)] * uses)
        self._stock[item] += uses * recipe.count - short

    def _recipe(self, item: str) -> Recipe:
        recipes = self._book.recipes_of[item]
        choice = recipes[0] if len(recipes) == 1 else self._choices.get(item)
        if not isinstance(choice, Recipe):
            raise _Undecided(item)
        return choice

    def _member(self, ingredient: str) -> str:
        if ingredient not in self._book.members:
            return ingredient
        choice = self._choices.get(ingredient)
        if not isinstance(choice, str):
            raise _Undecided(ingredient)
        return choice
