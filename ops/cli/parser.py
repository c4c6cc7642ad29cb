"""The parser of `horizonrl COMMAND [RECIPE...] [--section.key value ...]`, put together from the groups of commands."""

import argparse
from collections.abc import Sequence
from importlib import metadata

from horizonrl.common.errors import ConfigError, did_you_mean
from horizonrl.ops.cli.commands import (
    benchmarks,
    evaluation,
    history,
    inspection,
    publishing,
    setup,
    training,
)
from horizonrl.ops.cli.help import CommandParser, Commands, refuse_overrides
from horizonrl.ops.cli.overrides import split_overrides

GROUPS = (training, inspection, history, evaluation, publishing, benchmarks, setup)
"""In the order in which `horizonrl --help` lists them."""


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return a command's arguments and its overrides. Raises ConfigError, or exits as argparse does, for wrong ones."""
    words, overrides = split_overrides(argv)
    if words[:2] == setup.BROKER_KEYS.split():
        words = [setup.BROKER_KEYS, *words[2:]]
    parser, commands = make_parser()
    if words and not words[0].startswith("-") and words[0] not in commands:
        raise ConfigError(
            f"no command {words[0]!r}{did_you_mean(words[0], commands)} `horizonrl --help` lists all"
        )
    arguments, unknown = parser.parse_known_args(words)
    arguments.parser.refuse_unknown(unknown)
    if not arguments.takes_overrides:
        refuse_overrides(arguments.command, overrides)
    return arguments, overrides


def make_parser() -> tuple[CommandParser, list[str]]:
    """Return the parser and the names of its commands."""
    parser = CommandParser(
        prog="horizonrl",
        usage="horizonrl COMMAND [RECIPE ...] [--SECTION.KEY VALUE ...]",
        description="Train LLM agents on long, multi-turn tasks with asynchronous reinforcement learning.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version", action="version", version=f"horizonrl {metadata.version('horizonrl')}"
    )
    subparsers = parser.add_subparsers(
        dest="command",
        required=True,
        metavar="COMMAND",
        prog="horizonrl",
        help="one of those below",
    )
    listing: list[str] = []
    names: list[str] = []
    for group in GROUPS:
        commands = Commands(subparsers)
        group.add(commands)
        listing.append(f"{group.TITLE}:\n{commands.list_summaries()}")
        names += commands.summaries
    parser.epilog = "\n\n".join([*listing, "`horizonrl COMMAND --help` shows a command's options."])
    return parser, names
