"""`horizonrl envs`: what can be trained on, and whether an environment keeps its contract."""

import asyncio
from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from horizonrl.common.config import parse_overrides
from horizonrl.common.errors import ConfigError, MissingDependency
from horizonrl.envs import registry
from horizonrl.envs.check import check


def list_environments() -> int:
    """Print every registered environment with its tasks by category."""
    table = Table("environment", "version", "train", "test", "categories")
    for name in registry.names():
        try:
            environment, tasks = registry.load(name), registry.tasks(name)
        except (MissingDependency, ConfigError) as error:
            table.add_row(name, "-", "-", "-", str(error))
            continue
        splits = Counter(task.split for task in tasks)
        categories = Counter(task.category for task in tasks)
        shown = ", ".join(f"{category} {count}" for category, count in sorted(categories.items()))
        table.add_row(name, environment.version, str(splits["train"]), str(splits["test"]), shown)
    Console().print(table)
    return 0


def check_environment(env_id: str | None, overrides: Sequence[str]) -> int:
    """Run the conformance test of one environment with `--options.key value`; return 0 when every check holds."""
    if env_id is None:
        raise ConfigError(f"which environment? One of: {', '.join(registry.names())}")
    given = parse_overrides(overrides)
    if unknown := [key for key in given if key != "options"]:
        raise ConfigError(f"envs check takes --options.KEY VALUE, not --{unknown[0]}")
    report = asyncio.run(check(env_id, given.get("options")))
    table = Table("check", "holds", "")
    for item in report.checks:
        table.add_row(item.name, "yes" if item.passed else "NO", item.detail)
    Console().print(table)
    return 0 if report.passed else 1
