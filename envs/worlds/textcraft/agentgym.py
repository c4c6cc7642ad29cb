"""The world of one episode as AgentGym's server plays it: the same recipes, but its words and its parsing of commands.

It matches a command by its beginning, is strict about capitals and amounts, and checks the ingredients before it looks
for a recipe.
"""

import re

from horizonrl.envs.worlds.textcraft.crafting import MAX_COMMAND_CHARS, Crafting

_CRAFT = re.compile(r"craft (?:([0-9]+) )?(.*) using (.*)")
_GET = re.compile(r"get ([0-9]{1,9}) (.*)")
_COUNTED = re.compile(r"([0-9]{1,9}) (.*)")


class AgentGymCrafting(Crafting):
    """Holds the inventory on the way to one goal, and answers in AgentGym's words."""

    def follow(self, command: str) -> str:
        """Follow a command and return what the agent sees."""
        if len(command) > MAX_COMMAND_CHARS:
            return f"Could not execute a command of {len(command)} characters."
        if match := _CRAFT.match(command):
            return self._craft(match[2], match[3])
        if match := _GET.match(command):
            return self._get(int(match[1]), match[2])
        return (
            self._list_inventory()
            if command.startswith("inventory")
            else f"Could not execute {command}"
        )

    def _list_inventory(self) -> str:
        if not self.inventory:
            return "Inventory: You are not carrying anything."
        return "Inventory: " + "".join(
            f"[{item}] ({count}) " for item, count in self.inventory.items()
        )

    def _get(self, count: int, item: str) -> str:
        if item not in self.book.base_items:
            return f"Could not find {item}"
        self._add(item, count)
        return f"Got {count} {item}"

    def _craft(self, item: str, ingredients: str) -> str:
        paid: dict[str, int] = {}
        repeated = False
        for part in ingredients.split(","):
            counted = _COUNTED.match(part.strip())
            if counted is None:
                return f"Wrong item format: {part.strip()}"
            repeated = repeated or counted[2] in paid
            paid[counted[2]] = int(counted[1])
        if any(self.inventory.get(name, 0) < count for name, count in paid.items()):
            return f"Could not find enough items to craft {_identifier(item)}"
        recipe = next(
            (recipe for recipe in self.book.recipes_of.get(item, ()) if self._pays(paid, recipe)),
            None,
        )
        if recipe is None or repeated:
            return f"Could not find a valid recipe for {_identifier(item)}"
        for name, count in paid.items():
            self._remove(name, count)
        self._add(item, recipe.count)
        self.crafted = self.crafted or item == self.goal
        return f"Crafted {recipe.count} {_identifier(item)}"


def _identifier(item: str) -> str:
    return f"minecraft:{item.replace(' ', '_')}"
