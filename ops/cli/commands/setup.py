"""Commands that prepare a run: what is installed, recipes, the config they make, a broker's keys."""

import argparse
from pathlib import Path

from horizonrl.common.errors import MissingDependency
from horizonrl.ops.cli.help import Commands, add_recipes, bounded, host_name, new_file
from horizonrl.ops.cli.overrides import load_config

TITLE = "Set up"
BROKER_KEYS = "broker keys"
"""Two words on the command line, one command here: `broker` alone takes recipes."""


def add(commands: Commands) -> None:
    description = "Show what is installed, what is missing, and how to install it."
    commands.add("doctor", description, _doctor, overrides=False)
    description = "List the recipes of the package, or print some of them."
    recipes = commands.add("recipes", description, _recipes, overrides=False)
    recipes.add_argument(
        "names",
        nargs="*",
        type=Path,
        metavar="NAME",
        help="print this recipe, to start your own from",
    )
    config = commands.add(
        "config", "Print the config that recipes and overrides make.", _config, keys=True
    )
    config.add_argument(
        "--explain", metavar="KEY", help="explain a key, such as loss.low, or a section instead"
    )
    add_recipes(config)
    _add_plan(commands)
    keys = commands.add(
        BROKER_KEYS,
        "Make the keys of a secured broker. "
        "They are nkeys for the roles, TLS certificates, and nats-server's configuration.",
        _keys,
        overrides=False,
    )
    keys.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="where the keys go; existing keys are kept",
    )
    keys.add_argument(
        "--run",
        action="append",
        default=[],
        metavar="NAME",
        help="a run that gets users; repeatable",
    )
    keys.add_argument(
        "--host",
        action="append",
        type=host_name,
        default=[],
        metavar="NAME",
        help="name or address of the server; repeatable",
    )
    keys.add_argument(
        "--actors",
        type=bounded(1),
        default=1,
        metavar="N",
        help="actors of each named run that get a key; 1 by default",
    )
    keys.add_argument(
        "--seen-at",
        type=Path,
        metavar="DIR",
        help="the folder's path for nats-server, if it differs",
    )


def _add_plan(commands: Commands) -> None:
    description = (
        "Compute what a run needs on given machines, and what limits it. Nothing is started."
    )
    plan = commands.add("plan", description, _plan, keys=True)
    add_recipes(plan)
    plan.add_argument(
        "--learner", default="1xCPU", metavar="NxGPU", help="such as 8xH100; 1xCPU by default"
    )
    plan.add_argument(
        "--actors",
        metavar="NxGPU",
        help="GPUs of all actors; shared, the default, is on those of the learner",
    )
    plan.add_argument(
        "--model-size", metavar="SIZE", help="135M to 72B; by default that of model.name"
    )
    plan.add_argument(
        "--episode-tokens",
        type=bounded(1),
        metavar="N",
        help="mean of an episode; half of the context by default",
    )
    plan.add_argument(
        "--generated-tokens",
        type=bounded(1),
        metavar="N",
        help="of them generated; half by default",
    )
    plan.add_argument(
        "--json", dest="json_file", type=new_file, metavar="FILE", help="write the plan to a file"
    )


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
    from horizonrl.ops.rundir.directory import to_toml

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
