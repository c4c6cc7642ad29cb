"""The recipes that come with the package, by name: `horizonrl train laptop` needs no clone of the repository."""

import re
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from horizonrl.common.errors import ConfigError, did_you_mean
from horizonrl.ops.terminal.console import plain_console

FOLDER = Path(__file__).parents[1] / "recipes"


def recipes() -> dict[str, Path]:
    """Return the files of the recipes by name: those of single runs first, then those of the scenarios.

    The recipes of a paper keep their folder in the name, such as `agentgym-rl/textcraft`.
    """
    files = [*sorted(FOLDER.glob("*.toml")), *sorted(FOLDER.glob("scenarios/*.toml"))]
    of_papers = sorted(FOLDER.glob("agentgym-rl/*.toml"))
    return {file.stem: file for file in files} | {
        f"{file.parent.name}/{file.stem}": file for file in of_papers
    }


def find_recipe(path: Path) -> Path:
    """Return a recipe's file: the path itself, or the recipe of this name. Raises ConfigError for an unknown name."""
    recipe_name, name = recipes(), path.as_posix()
    # A file of that name comes first, so that an own recipe is never shadowed by one of ours.
    if (
        path.exists()
        or path.suffix
        or (len(path.parts) > 1 and not (FOLDER / path.parts[0]).is_dir())
    ):
        return path
    if name not in recipe_name:
        raise ConfigError(
            f"no recipe {name!r}, neither a file nor a name{did_you_mean(name, recipe_name)} "
            "`horizonrl recipes` lists all"
        )
    return recipe_name[name]


def show_recipes(names: Sequence[Path]) -> int:
    """Print the text of the named recipes, or what each recipe trains."""
    for name in names:
        print(find_recipe(name).read_text(encoding="utf-8"), end="")
    if not names:
        table = Table("recipe", "what it trains")
        for recipe_name, file in recipes().items():
            table.add_row(recipe_name, purpose(file))
        plain_console().print(table)
        print("Train with one recipe, or combine several: horizonrl train laptop lora")
        print("Start your own from one: horizonrl recipes laptop > mine.toml")
    return 0


def purpose(file: Path) -> str:
    """Return the first sentence of the comment that a recipe begins with."""
    comment = re.match(r"(?:#.*\n)+", file.read_text(encoding="utf-8"))
    text = " ".join(
        line.removeprefix("#").strip() for line in (comment[0] if comment else "").splitlines()
    )
    return re.split(r"(?<=\.) ", text)[0]
