"""`train`, and one command for each role."""

import argparse
import shlex
import sys
from pathlib import Path

from horizonrl.ops.cli.help import Commands, add_recipes, option
from horizonrl.ops.cli.overrides import load_config

TITLE = "Train"
ROLES = {
    "broker": "Run the broker: a nats-server with the run's streams.",
    "controller": "Run the controller.",
    "learner": "Run the learner. It resumes from its newest checkpoint by itself.",
    "actor": "Run one actor.",
}

_TICKETS = ("run", "broker", "model", "envs", "rollout", "imitation", "rl", "advantage")
SECTIONS = {
    "broker": ("run", "broker"),
    "controller": (*_TICKETS, "horizon", "curriculum", "eval", "metrics"),
    "learner": (
        *(*_TICKETS, "horizon", "curriculum", "eval", "metrics"),
        *("reward", "loss", "correction", "reference", "learner", "lora", "tracker"),
    ),
    "actor": (*_TICKETS, "actor", "metrics"),
}
"""The sections that each role reads."""


def add(commands: Commands) -> None:
    description = "Train on this machine: starts every process and shows one console."
    add_recipes(commands.add("train", description, _train, keys=True))
    for role, description in ROLES.items():
        command = commands.add(role, description, _role, sections=SECTIONS[role])
        if role == "broker":
            option(
                command,
                "--cluster",
                "N",
                "start 1, 3 or 5 servers, each with a copy of every stream; 1 by default",
                type=int,
                choices=(1, 3, 5),
                default=1,
            )
            option(
                command,
                "--keys",
                "DIR",
                "serve with the keys of `horizonrl broker keys`",
                type=Path,
            )
        add_recipes(command)


def _train(arguments: argparse.Namespace, overrides: list[str]) -> int:
    config = load_config(arguments.recipes, overrides)
    from horizonrl.ops.cli.doctor import require_engines

    # Before anything is made: a missing engine would otherwise end a part, and show in its log only.
    require_engines(config)
    from horizonrl.ops.launch.local import train

    return train(config, resume_command=shlex.join(["horizonrl", *sys.argv[1:]]))


def _role(arguments: argparse.Namespace, overrides: list[str]) -> int:
    config = load_config(arguments.recipes, overrides)
    if arguments.command == "broker":
        from horizonrl.ops.launch.broker import run_broker

        return run_broker(config, arguments.cluster, arguments.keys)
    from horizonrl.ops.launch.roles import run

    return run(arguments.command, config)
