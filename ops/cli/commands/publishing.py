"""Commands that turn a run into something for others: a model, a dataset, demonstrations."""

import argparse
from pathlib import Path

from horizonrl.common.errors import ConfigError
from horizonrl.ops.cli.help import (
    CommandParser,
    Commands,
    add_recipes,
    add_run_dir,
    new_file,
    number_within,
    option,
    switch,
)
from horizonrl.ops.cli.overrides import load_config

TITLE = "Publish"


def add(commands: Commands) -> None:
    description = "Write a run's newest or best weights as a Hugging Face directory."
    export = commands.add("export", description, _export, overrides=False)
    _add_paths(export)
    switch(export, "--best", "the version with the best evaluation, not the newest")
    _add_push(export)
    description = "Write a run's episodes as a dataset. It has JSON lines, a schema and a card."
    dataset = commands.add("dataset", description, _dataset, overrides=False)
    _add_paths(dataset)
    _add_push(dataset)
    description = "Write an expert's demonstrations as conversations (JSON lines)."
    demos = commands.add("demos", description, _demos, keys=True)
    add_recipes(demos)
    option(demos, "--out", "FILE", "the file to write", type=new_file, required=True)
    option(demos, "--count", "N", "only the first N tasks; all by default", type=number_within(1))
    option(demos, "--env", "ID", "which environment, if the recipe has several", dest="env_id")


def _add_paths(command: CommandParser) -> None:
    add_run_dir(command)
    option(command, "out", "OUT", "the directory to write", type=Path)


def _add_push(command: CommandParser) -> None:
    option(
        command,
        "--push",
        "OWNER/NAME",
        "upload to the Hugging Face Hub, with the token in HF_TOKEN",
    )
    switch(command, "--public", "with --push: make a new repository public")


def _require_push(arguments: argparse.Namespace) -> None:
    """Raise what would keep the result from being pushed, before it is made."""
    from horizonrl.ops.publish.hub import require_push

    if arguments.push:
        require_push(arguments.push)
    elif arguments.public:
        raise ConfigError(
            "--public is for a repository on the Hub: add --push OWNER/NAME, or leave it out"
        )


def _export(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from horizonrl.ops.publish.export import export_run
    from horizonrl.ops.publish.hub import push
    from horizonrl.ops.terminal.console import plain_console
    from horizonrl.ops.terminal.waiting import waiting

    _require_push(arguments)
    with waiting(plain_console(stderr=True), f"exporting {arguments.run_dir}"):
        step = export_run(arguments.run_dir, arguments.out, best=arguments.best)
    print(f"exported step {step} to {arguments.out}")
    if arguments.push:
        print(f"pushed to {push(arguments.out, arguments.push, 'model', public=arguments.public)}")
    return 0


def _dataset(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from horizonrl.ops.publish.dataset import write_dataset
    from horizonrl.ops.publish.hub import push

    _require_push(arguments)
    counts = write_dataset(arguments.run_dir, arguments.out)
    print(f"wrote {counts.rows} episodes with {counts.tokens} generated tokens to {arguments.out}")
    if counts.unreadable:
        print(f"left out {counts.unreadable} unreadable lines of {arguments.run_dir}/episodes")
    if arguments.push:
        print(
            f"pushed to {push(arguments.out, arguments.push, 'dataset', public=arguments.public)}"
        )
    return 0


def _demos(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from horizonrl.ops.publish.demos import write_demonstrations

    config = load_config(arguments.recipes, overrides)
    return write_demonstrations(config, arguments.out, arguments.count, arguments.env_id)
