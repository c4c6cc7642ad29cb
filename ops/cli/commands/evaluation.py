"""`eval` and `envs`: how good a model is, and in what it can be trained."""

import argparse
import os
import sys
from pathlib import Path

from horizonrl.ops.cli.help import CommandParser, Commands, number_within, refuse_overrides
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
    command.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a Hugging Face directory, a run, a checkpoint, or a known name",
    )
    _add_endpoint(command)
    _add_choice(command)
    command.add_argument(
        "--out",
        type=Path,
        default=Path("evaluation"),
        metavar="DIR",
        help="results; an evaluation in DIR is resumed",
    )
    _add_envs(commands)


def _add_endpoint(command: CommandParser) -> None:
    endpoint = command.add_argument_group("instead of MODEL, an OpenAI-compatible endpoint")
    endpoint.add_argument("--endpoint", metavar="URL", help="its address, such as http://HOST/v1")
    endpoint.add_argument("--model-name", metavar="NAME", help="the model's name at the endpoint")
    endpoint.add_argument(
        "--key-variable",
        metavar="NAME",
        help="environment variable with the API key; OPENAI_API_KEY by default, if set",
    )


def _add_choice(command: CommandParser) -> None:
    choice = command.add_argument_group("what to play")
    choice.add_argument(
        "--recipe",
        action="append",
        type=Path,
        default=[],
        metavar="FILE",
        help="a recipe, or its name, for sampling and environments; repeatable",
    )
    choice.add_argument(
        "--table", action="store_true", help="the paper's 27 tasks, on HorizonRL's own environments"
    )
    choice.add_argument(
        "--env", nargs="+", default=(), metavar="ID", help="environments; the recipe's by default"
    )
    choice.add_argument(
        "--split",
        choices=("train", "validation", "test", "all"),
        default="test",
        help="test by default, for a result; validation, to choose by",
    )
    choice.add_argument(
        "--categories", nargs="+", default=(), metavar="NAME", help="only these; all by default"
    )
    choice.add_argument("--tasks", type=int, metavar="N", help="tasks per category; all by default")
    choice.add_argument(
        "--samples",
        nargs="+",
        type=int,
        default=(),
        metavar="K",
        help="episodes per task; pass@K is reported",
    )
    choice.add_argument(
        "--turns",
        nargs="+",
        type=int,
        default=(),
        metavar="T",
        help="turn limit; several give a block each",
    )


def _eval(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from horizonrl.ops.cli.recipe_names import find_recipe
    from horizonrl.ops.evaluation.plan import Choice
    from horizonrl.ops.evaluation.run import evaluate
    from horizonrl.ops.evaluation.subjects import SubjectRequest

    keys, options = split_options(overrides)
    subject = SubjectRequest(
        model=arguments.model,
        endpoint=arguments.endpoint,
        model_name=arguments.model_name,
        key_variable=arguments.key_variable,
        recipes=tuple(map(find_recipe, arguments.recipe)),
        overrides=keys,
    )
    choice = Choice(
        env_ids=tuple(arguments.env),
        table=arguments.table,
        split=arguments.split,
        categories=tuple(arguments.categories),
        tasks=arguments.tasks,
        samples=tuple(arguments.samples),
        turns=tuple(arguments.turns),
        options=options,
    )
    code = evaluate(subject, choice, arguments.out)
    if code == 130:  # an engine that is interrupted while it starts leaves threads that never end
        sys.stderr.flush()
        os._exit(code)
    return code


def _add_envs(commands: Commands) -> None:
    envs = commands.add("envs", "List, check, play or serve environments.", _envs)
    envs.add_argument("action", choices=("list", "check", "play", "serve"))
    envs.add_argument(
        "env_ids",
        nargs="*",
        metavar="ID",
        help="environments; set options with --options.KEY VALUE, or --ID.KEY VALUE for one of several",
    )
    play = envs.add_argument_group("envs play: you are the agent")
    play.add_argument("--task", metavar="TASK", help="the task's id; the first task by default")
    play.add_argument(
        "--multiline",
        action="store_true",
        help="a reply ends with a line that is a single dot, not with its first line",
    )
    serve = envs.add_argument_group("envs serve: the HTTP protocol of AgentGym's servers")
    serve.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; 127.0.0.1 by default"
    )
    serve.add_argument(
        "--port",
        type=number_within(0, 65535),
        default=36001,
        metavar="N",
        help="36001 by default; 0 takes a free port",
    )
    serve.add_argument(
        "--workers",
        type=number_within(0),
        default=0,
        metavar="N",
        help="worker processes; 0 (the default) plays in this one",
    )
    serve.add_argument(
        "--capacity",
        type=number_within(1),
        default=1024,
        metavar="N",
        help="episodes per environment at a time; 1024",
    )
    serve.add_argument(
        "--ttl",
        type=number_within(1.0),
        default=1800.0,
        metavar="S",
        help="seconds until an idle episode is closed; 1800",
    )
    serve.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="host name that clients may use; repeatable",
    )
    serve.add_argument(
        "--compatible",
        action="store_true",
        help="report errors as AgentGym does: status 200 with an error in the body",
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
