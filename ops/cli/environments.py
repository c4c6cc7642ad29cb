"""`horizonrl envs`: list environments, check that one keeps its contract, serve them over HTTP. Playing is play.py."""

import argparse
import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from horizonrl.common.config.loading import parse_overrides
from horizonrl.common.errors import ConfigError, MissingDependency
from horizonrl.common.logs import configure_logs
from horizonrl.common.service import run_role
from horizonrl.envs import registry
from horizonrl.envs.check import Check, check
from horizonrl.ops.terminal.console import plain_console

MOST_CATEGORIES = 8
"""A longer list is shown only if its environment is named."""


def list_environments(env_ids: Sequence[str] = ()) -> int:
    """Print every registered environment, or those that are named, with its tasks by category."""
    registry.require_known(*env_ids)
    table = Table("environment", "version", *registry.SPLITS, "categories")
    for column in table.columns:
        column.overflow = "fold"
    table.columns[0].no_wrap = True  # a name is there to be copied
    # Below the table, where a message is not broken to the width of a column: it has a command or a path to copy.
    problems: list[str] = []
    for name in env_ids or registry.names():
        try:
            environment, tasks = registry.load(name), registry.tasks(name)
        except (MissingDependency, ConfigError) as error:
            table.add_row(name, *["-"] * (1 + len(registry.SPLITS)), "see below")
            problems.append(f"{name}: {str(error).removeprefix(f'environment {name!r} ')}")
            continue
        splits = Counter(task.split for task in tasks)
        categories = Counter(task.category for task in tasks)
        shown = ", ".join(f"{category} {count}" for category, count in sorted(categories.items()))
        if len(categories) > MOST_CATEGORIES and not env_ids:
            shown = f"{len(categories)} categories: horizonrl envs list {name}"
        counts = [str(splits[split]) for split in registry.SPLITS]
        table.add_row(name, environment.version, *counts, shown)
    console = plain_console()
    console.print(table)
    for problem in problems:
        console.print(problem, highlight=False, soft_wrap=True)
    return 0


def check_environment(env_ids: Sequence[str], overrides: Sequence[str]) -> int:
    """Run the conformance test of one environment with `--options.key value`; return 0 when every check holds."""
    env_id, options = choose("check", env_ids, overrides)
    report = asyncio.run(check(env_id, options))
    console = plain_console()
    table = Table("check", "holds", "")
    for item in report.checks:
        holds = "skipped" if item.skipped else "yes" if item.passed else "NO"
        table.add_row(item.name, holds, item.detail if item.passed else "see below")
    console.print(table)
    # One defect may fail several checks: it is described once.
    failed: dict[tuple[str, str], list[Check]] = {}
    for item in (item for item in report.checks if not item.passed):
        failed.setdefault((item.detail, item.source), []).append(item)
    for (detail, source), items in failed.items():
        names = [f"NO: {item.name}" for item in items]
        where = [f"    at: {source}"] if source else []
        after = [f"    after: {items[0].last_call}"] if items[0].last_call else []
        text = "\n".join([*names, f"    {detail}", *where, *after])
        console.print(text, highlight=False, soft_wrap=True)
    return 0 if report.passed else 1


def choose(
    action: str, env_ids: Sequence[str], overrides: Sequence[str]
) -> tuple[str, Mapping[str, Any]]:
    """Return the one environment that a command names, and its options."""
    if not env_ids:
        raise ConfigError("which environment? `horizonrl envs list` lists all")
    if len(env_ids) > 1:
        raise ConfigError(
            f"envs {action} takes one environment, not {len(env_ids)}: {', '.join(env_ids)}"
        )
    options = parse_overrides(overrides)
    if unknown := [key for key in options if key != "options"]:
        raise ConfigError(f"envs {action} takes --options.KEY VALUE, not --{unknown[0]}")
    return env_ids[0], options.get("options", {})


def serve_environments(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Serve environments until SIGTERM or SIGINT; return 0."""
    from horizonrl.envs.serving.server import Serving, serve

    env_ids: list[str] = arguments.env_ids
    if not env_ids:
        raise ConfigError("which environments? `horizonrl envs list` lists all")
    options: dict[str, Any] = parse_overrides(overrides)
    if len(env_ids) == 1 and "options" in options:
        options = {env_ids[0]: options["options"]}
    if unknown := [key for key in options if key not in env_ids]:
        raise ConfigError(
            f"--{unknown[0]} names no environment that is served here: {', '.join(env_ids)}"
        )
    serving = Serving(
        environments={env_id: options.get(env_id, {}) for env_id in env_ids},
        host=arguments.host,
        port=arguments.port,
        workers=arguments.workers,
        capacity=arguments.capacity,
        ttl_s=arguments.ttl,
        compatible=arguments.compatible,
        hosts=arguments.allow_host,
    )
    configure_logs(run="envs", role="server")
    return run_role(lambda: serve(serving, lambda address: print(address, flush=True)))
