"""`eval` and `envs`: how good a model is, and in what it can be trained."""

import argparse
import os
import sys
from pathlib import Path

from horizonrl.ops.cli.help import (
    CommandParser,
    Commands,
    make_request,
    number_within,
    option,
    refuse_overrides,
    switch,
)
from horizonrl.ops.cli.overrides import split_options

TITLE = "Evaluate"


def add(commands: Commands) -> None:
    command = commands.add(
        "eval",
        "Measure a model's success on held-out tasks, with intervals. "
        "The same command resumes. Set options of the environments with --options.KEY VALUE.",
        _eval,
        keys=True,
    )
    option(
        command,
        "model",
        "MODEL",
        "a Hugging Face directory, a run, a checkpoint, or a known name",
        nargs="?",
    )
    _add_endpoint(command)
    _add_choice(command)
    option(
        command,
        "--out",
        "DIR",
        "results; an evaluation in DIR is resumed",
        type=Path,
        default=Path("evaluation"),
    )
    _add_envs(commands)


def _add_endpoint(command: CommandParser) -> None:
    endpoint = command.add_argument_group("instead of MODEL, an OpenAI-compatible endpoint")
    option(endpoint, "--endpoint", "URL", "its address, such as http://HOST/v1")
    option(endpoint, "--model-name", "NAME", "the model's name at the endpoint")
    option(
        endpoint,
        "--key-variable",
        "NAME",
        "environment variable with the API key; OPENAI_API_KEY by default, if set",
    )


def _add_choice(command: CommandParser) -> None:
    choice = command.add_argument_group("what to play")
    option(
        choice,
        "--recipe",
        "FILE",
        "a recipe, or its name, for sampling and environments; repeatable",
        action="append",
        type=Path,
        default=[],
    )
    switch(choice, "--table", "the paper's 27 tasks, on HorizonRL's own environments")
    option(
        choice,
        "--env",
        "ID",
        "environments; the recipe's by default",
        dest="env_ids",
        nargs="+",
        default=(),
    )
    choice.add_argument(
        "--split",
        choices=("train", "validation", "test", "all"),
        default="test",
        help="test by default, for a result; validation, to choose by",
    )
    option(choice, "--categories", "NAME", "only these; all by default", nargs="+", default=())
    option(choice, "--tasks", "N", "tasks per category; all by default", type=int)
    option(
        choice,
        "--samples",
        "K",
        "episodes per task; pass@K is reported",
        nargs="+",
        type=int,
        default=(),
    )
    option(
        choice,
        "--turns",
        "T",
        "turn limit; several give a block each",
        nargs="+",
        type=int,
        default=(),
    )


def _eval(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from horizonrl.ops.cli.recipe_names import find_recipe
    from horizonrl.ops.evaluation.plan import Choice
    from horizonrl.ops.evaluation.run import evaluate
    from horizonrl.ops.evaluation.subjects import SubjectRequest

    keys, options = split_options(overrides)
    recipes = tuple(map(find_recipe, arguments.recipe))
    subject = make_request(SubjectRequest, arguments, recipes=recipes, overrides=keys)
    choice = make_request(Choice, arguments, options=options)
    code = evaluate(subject, choice, arguments.out)
    if code == 130:  # an engine that is interrupted while it starts leaves threads that never end
        sys.stderr.flush()
        os._exit(code)
    return code


def _add_envs(commands: Commands) -> None:
    envs = commands.add("envs", "List, check, play or serve environments.", _envs)
    envs.add_argument("action", choices=("list", "check", "play", "serve"))
    option(
        envs,
        "env_ids",
        "ID",
        "environments; set options with --options.KEY VALUE, or --ID.KEY VALUE for one of several",
        nargs="*",
    )
    play = envs.add_argument_group("envs play: you are the agent")
    option(play, "--task", "TASK", "the task's id; the first task by default")
    switch(
        play,
        "--multiline",
        "a reply ends with a line that is a single dot, not with its first line",
    )
    serve = envs.add_argument_group("envs serve: the HTTP protocol of AgentGym's servers")
    text = "address to listen on; 127.0.0.1 by default"
    serve.add_argument("--host", default="127.0.0.1", help=text)
    option(
        serve,
        "--port",
        "N",
        "36001 by default; 0 takes a free port",
        type=number_within(0, 65535),
        default=36001,
    )
    option(
        serve,
        "--workers",
        "N",
        "worker processes; 0 (the default) plays in this one",
        type=number_within(0),
        default=0,
    )
    option(
        serve,
        "--capacity",
        "N",
        "episodes per environment at a time; 1024",
        type=number_within(1),
        default=1024,
    )
    option(
        serve,
        "--ttl",
        "S",
        "seconds until an idle episode is closed; 1800",
        type=number_within(1.0),
        default=1800.0,
    )
    option(
        serve,
        "--allow-host",
        "NAME",
        "host name that clients may use; repeatable",
        action="append",
        default=[],
    )
    switch(
        serve,
        "--compatible",
        "report errors as AgentGym does: status 200 with an error in the body",
    )


def _envs(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from horizonrl.ops.cli import environments

    match arguments.action:
        case "serve":
            return environments.serve_environments(arguments, overrides)
        case "check":
            return environments.check_environment(arguments.env_ids, overrides)
        case "play":
            from horizonrl.ops.cli.play import play_environment

            return play_environment(
                arguments.env_ids, arguments.task, overrides, multiline=arguments.multiline
            )
        case _:
            refuse_overrides("envs list", overrides)
            return environments.list_environments(arguments.env_ids)
