"""Command-line words that belong to the config rather than to the command: `--section.key value`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from horizonrl.common.config.schema import RunConfig


def split_overrides(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate a command's own words from `--section.key value`, and from `--envs`, which is set as a whole."""
    words: list[str] = []
    overrides: list[str] = []
    tokens = iter(argv)
    for token in tokens:
        # By hand: pydantic-settings' own command line would build a parser of every key at each start.
        flag, equals, _ = token.partition("=")
        if flag == "--envs" or (flag.startswith("--") and "." in flag):
            overrides.append(token)
            if not equals and (value := next(tokens, None)) is not None:
                overrides.append(value)
        else:
            words.append(token)
    return words, overrides


def split_options(overrides: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Separate the config's own overrides from `--options.KEY value`, which goes to the environments."""
    from horizonrl.common.config.loading import parse_overrides

    ours: list[str] = []
    options: list[str] = []
    tokens = iter(overrides)
    for token in tokens:
        target = options if token.startswith("--options.") else ours
        target.append(token if "=" in token else f"{token}={next(tokens, '')}")
    return ours, parse_overrides(options).get("options", {})


def load_config(recipes: Sequence[Path], overrides: Sequence[str]) -> "RunConfig":
    """Return the config of recipes, given as files or by name, with overrides."""
    from horizonrl.common.config.schema import RunConfig
    from horizonrl.ops.cli.recipe_names import find_recipe

    return RunConfig.load([find_recipe(recipe) for recipe in recipes], overrides)
