"""Configs for programs: a recipe by path or name, with overrides as Python values."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from horizonrl.common.config.arguments import checked
from horizonrl.common.config.schema import RunConfig
from horizonrl.ops.cli.overrides import load_config


@checked
def load_recipe(
    recipe: str | Path | Sequence[str | Path] = (), overrides: Mapping[str, Any] | None = None
) -> RunConfig:
    """Return the config of a recipe, or of several, of which later ones win; without one, the defaults.

    A recipe is a TOML file or a name that `horizonrl recipes` lists. `overrides` has keys such as `"rl.steps"` and
    wins over environment variables, which win over recipes. Raises ConfigError with a line per mistake.
    """
    recipes = [recipe] if isinstance(recipe, str | Path) else recipe
    return load_config([Path(path) for path in recipes], words(overrides or {}))


def words(overrides: Mapping[str, Any]) -> list[str]:
    """Return overrides as the command line has them: `{"rl.steps": 4}` is `--rl.steps=4`."""
    # Texts as JSON too: "123" would become a number otherwise.
    return [f"--{key}={json.dumps(value, default=str)}" for key, value in overrides.items()]
