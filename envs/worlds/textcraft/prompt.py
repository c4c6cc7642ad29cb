"""What the agent reads first: the rules, the recipes and the goal, the same for a task on every machine."""

from random import Random

from horizonrl.envs.formats import ActionFormat, explain, explain_briefly
from horizonrl.envs.game import Style, random_for
from horizonrl.envs.worlds.textcraft.crafting import COMMANDS
from horizonrl.envs.worlds.textcraft.expert import recipes_needed
from horizonrl.envs.worlds.textcraft.recipes import Recipe, RecipeBook

_FULL = """\
You craft items in Minecraft. Each turn you give one command:
get N item: find a base item, one that no recipe makes
craft N item using M ingredient, M ingredient: follow one recipe once, with exactly its ingredients and amounts
inventory: list what you carry
Where a recipe says planks or wool, name the kind that you use, such as oak planks."""
_COMPACT = """\
Commands: get N item | craft N item using M item, M item | inventory
Get what no recipe makes."""
_NATIVE = """\
You craft items in Minecraft with tools. A recipe is followed once, with exactly its ingredients and amounts; write the
ingredients as it does, such as "2 oak planks, 1 stick".
Where a recipe says planks or wool, name the kind that you use, such as oak planks."""


def first_observation(
    book: RecipeBook, goal: str, distractors: int, form: tuple[Style, ActionFormat]
) -> str:
    """Return the rules, the shuffled recipes and, last, the goal.

    The full style lists every recipe by which the goal can be reached, as the original does; the compact one only
    those of a shortest plan. Either adds `distractors` others.
    """
    style, action_format = form
    draw = random_for(goal)
    needed = recipes_needed(book, goal)
    recipes = list(needed if style == "compact" else book.reachable(goal))
    recipes += _distractors(book, recipes, distractors, draw)
    draw.shuffle(recipes)
    listed = "\n".join(map(str, recipes))
    if style == "agentgym":
        return f"Crafting commands:\n{listed}\n\nGoal: craft {goal}."
    wish = f"Goal: craft {needed[-1].count} {goal}"
    if style == "compact":
        reply = explain_briefly(action_format, COMMANDS)
        rules = "" if action_format == "native" else _COMPACT
        return "\n".join(filter(None, (rules, *_tags(book, needed), reply, listed, wish)))
    rules, reply = _NATIVE if action_format == "native" else _FULL, explain(action_format, COMMANDS)
    return f"{rules}\n{reply}\n\nCrafting commands:\n{listed}\n\n{wish}"


def _tags(book: RecipeBook, recipes: tuple[Recipe, ...]) -> list[str]:
    """Return a line for each tag among the ingredients, with the member that these recipes make."""
    made = {recipe.item for recipe in recipes}
    names = dict.fromkeys(
        ingredient.name for recipe in recipes for ingredient in recipe.ingredients
    )
    return [
        f"For {name} use one kind, such as {item}."
        for name in names
        for item in book.members.get(name, ())
        if item in made
    ]


def _distractors(book: RecipeBook, listed: list[Recipe], count: int, draw: Random) -> list[Recipe]:
    """Draw recipes that are not listed: first among those that use a listed ingredient, then among all."""
    related = dict.fromkeys(
        use
        for recipe in listed
        for ingredient in recipe.ingredients
        for use in book.uses_of[ingredient.name]
    )
    near = [recipe for recipe in related if recipe not in listed]
    drawn = draw.sample(near, min(count, len(near)))
    if len(drawn) < count:
        far = [recipe for recipe in book.recipes if recipe not in related and recipe not in listed]
        drawn += draw.sample(far, min(count - len(drawn), len(far)))
    return drawn
