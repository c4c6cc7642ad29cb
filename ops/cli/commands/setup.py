"""Commands that prepare a run: what is installed, recipes, the config they make, a broker's keys."""

import argparse
from pathlib import Path

from horizonrl.common.errors import MissingDependency
from horizonrl.ops.cli.help import Commands, add_json, add_recipes, host_name, number_within, option
from horizonrl.ops.cli.overrides import load_config

TITLE = "Set up"
BROKER_KEYS = "broker keys"
"""Two words on the command line, one command here: `broker` alone takes recipes."""


def add(commands: Commands) -> None:
    description = "Show what is installed, what is missing, and how to install it."
    commands.add("doctor", description, _doctor, overrides=False)
    description = "List the recipes of the package, or print some of them."
    recipes = commands.add("recipes", description, _recipes, overrides=False)
    option(
        recipes, "names", "NAME", "print this recipe, to start your own from", nargs="*", type=Path
    )
    description = "Print the config that recipes and overrides make."
    config = commands.add("config", description, _config, keys=True)
    option(config, "--explain", "KEY", "explain a key, such as loss.low, or a section instead")
    add_recipes(config)
    _add_plan(commands)
    keys = commands.add(
        BROKER_KEYS,
        "Make the keys of a secured broker. "
        "They are nkeys for the roles, TLS certificates, and nats-server's configuration.",
        _keys,
        overrides=False,
    )
    option(
        keys, "--out", "DIR", "where the keys go; existing keys are kept", type=Path, required=True
    )
    option(keys, "--run", "NAME", "a run that gets users; repeatable", action="append", default=[])
    option(
        keys,
        "--host",
        "NAME",
        "name or address of the server; repeatable",
        action="append",
        type=host_name,
        default=[],
    )
    option(
        keys,
        "--actors",
        "N",
        "actors of each named run that get a key; 1 by default",
        type=number_within(1),
        default=1,
    )
    option(keys, "--seen-at", "DIR", "the folder's path for nats-server, if it differs", type=Path)


def _add_plan(commands: Commands) -> None:
    description = (
        "Compute what a run needs on given machines, and what limits it. Nothing is started."
    )
    plan = commands.add("plan", description, _plan, keys=True)
    add_recipes(plan)
    option(plan, "--learner", "NxGPU", "such as 8xH100; 1xCPU by default", default="1xCPU")
    option(
        plan,
        "--actors",
        "NxGPU",
        "GPUs of all actors; shared, the default, is on those of the learner",
    )
    option(plan, "--model-size", "SIZE", "135M to 72B; by default that of model.name")
    option(
        plan,
        "--episode-tokens",
        "N",
        "mean of an episode; half of the context by default",
        type=number_within(1),
    )
    option(
        plan, "--generated-tokens", "N", "of them generated; half by default", type=number_within(1)
    )
    add_json(plan, "plan")


def _doctor(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from horizonrl.ops.cli.doctor import examine

    return examine()


def _recipes(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from horizonrl.ops.cli.recipe_names import show_recipes

    return show_recipes(arguments.names)


def _config(arguments: argparse.Namespace, overrides: list[str]) -> int:
    if arguments.explain is not None:
        from horizonrl.ops.cli.explain import explain

        print(explain(arguments.explain))
        return 0
    config = load_config(arguments.recipes, overrides)
    from horizonrl.ops.launch.names import require_names
    from horizonrl.ops.rundir.directory import to_toml

    require_names(config)
    print(to_toml(config), end="")
    return 0


def _plan(arguments: argparse.Namespace, overrides: list[str]) -> int:
    config = load_config(arguments.recipes, overrides)
    from horizonrl.ops.plan import page

    tokens = (arguments.episode_tokens, arguments.generated_tokens)
    fleets = (arguments.learner, arguments.actors)
    return page.run(config, fleets, arguments.model_size, tokens, arguments.json_file)


def _keys(arguments: argparse.Namespace, overrides: list[str]) -> int:
    try:
        from horizonrl.broker.nats.keys import make_keys
    except ImportError as error:
        raise MissingDependency(f"{error}: run `pip install cryptography`") from None

    for path in make_keys(
        arguments.out, arguments.run, arguments.host, arguments.seen_at, arguments.actors
    ):
        print(f"wrote {path}")
    return 0
