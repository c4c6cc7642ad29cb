"""`bench` and `study`: what the system costs, and what it learns."""

import argparse
from pathlib import Path

from horizonrl.ops.cli.help import CommandParser, Commands, integers, new_file

TITLE = "Measure"


def add(commands: Commands) -> None:
    _add_bench(commands)
    description = (
        "Train a study's variants under its seeds and compare them; look back at finished runs."
    )
    study = commands.add("study", description, _no_name)
    names = study.add_subparsers(
        dest="study", required=True, metavar="NAME", help="one of those below"
    )
    studies = Commands(names)
    _add_learning(studies)
    _add_sampling(studies)
    _add_timeline(studies)
    study.epilog = f"studies:\n{studies.listed()}"
    study.formatter_class = argparse.RawDescriptionHelpFormatter


def _no_name(arguments: argparse.Namespace, overrides: list[str]) -> int:
    raise AssertionError("the parser requires a NAME")


def _add_bench(commands: Commands) -> None:
    description = "Measure HorizonRL's speed and memory beside what you would pick instead."
    bench = commands.add("bench", description, _bench, overrides=False)
    bench.add_argument(
        "rows",
        nargs="*",
        metavar="ROWS",
        help="learner, rollouts, queues, starts (by default these four), gateway, durability, weights, "
        "followers, memory, envs, or envs:ID for one environment",
    )
    bench.add_argument(
        "--small", action="store_true", help="seconds instead of minutes, to see that it works"
    )
    bench.add_argument("--model", metavar="NAME", help="SmolLM2 by default, for memory a tiny one")
    _add_json(bench)


def _add_learning(studies: Commands) -> None:
    description = "Train a study's variants under its seeds; compare them."
    learning = studies.add("learning", description, _learning, keys=True)
    # Not `study`, which names the command.
    learning.add_argument(
        "file", type=Path, metavar="STUDY", help="a TOML file, or a name in ops/recipes/studies"
    )
    learning.add_argument(
        "--directory",
        type=Path,
        required=True,
        metavar="DIR",
        help="the study's runs; a study in DIR is resumed",
    )
    learning.add_argument(
        "--phase", metavar="NAME", help="a phase of the study, such as screen, confirm or small"
    )
    learning.add_argument(
        "--seeds", type=integers, default=(), metavar="N,N", help="only these of the study's seeds"
    )
    learning.add_argument(
        "--only",
        nargs="+",
        default=(),
        metavar="VARIANT",
        help="only these variants; ppo-* matches several",
    )
    learning.add_argument(
        "--report-only", action="store_true", help="train nothing; report the runs that finished"
    )
    learning.add_argument(
        "--with",
        dest="earlier",
        nargs="+",
        type=Path,
        default=(),
        metavar="FILE",
        help="a results.json of another machine, sitting or study: runs of the same config are not trained again",
    )


def _add_sampling(studies: Commands) -> None:
    description = "What other ways of sampling groups would have cost some runs."
    sampling = studies.add("sampling", description, _sampling, overrides=False)
    sampling.add_argument(
        "run_dirs", nargs="+", type=Path, metavar="RUN_DIR", help="runs with their episodes"
    )
    _add_json(sampling)


def _add_timeline(studies: Commands) -> None:
    description = "Show where each second of a finished run went, by role."
    timeline = studies.add("timeline", description, _timeline, overrides=False)
    timeline.add_argument(
        "run_dir", type=Path, metavar="RUN_DIR", help="the directory of a run of `horizonrl train`"
    )
    timeline.add_argument(
        "--svg",
        dest="svg_file",
        type=new_file,
        metavar="FILE",
        help="draw it, one lane for each role",
    )


def _add_json(command: CommandParser) -> None:
    command.add_argument(
        "--json", dest="json_file", type=new_file, metavar="FILE", help="write the result to a file"
    )


def _bench(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from horizonrl.ops.bench.case import Request
    from horizonrl.ops.bench.run import run

    return run(arguments.rows, Request(arguments.small, model=arguments.model), arguments.json_file)


def _learning(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from horizonrl.ops.studies.run import StudyRequest, run

    request = StudyRequest(
        study=arguments.file,
        directory=arguments.directory,
        seeds=arguments.seeds,
        only=arguments.only,
        phase=arguments.phase,
        report_only=arguments.report_only,
        earlier=arguments.earlier,
        overrides=overrides,
    )
    return run(request)


def _sampling(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from horizonrl.ops.studies import sampling

    return sampling.run(arguments.run_dirs, arguments.json_file)


def _timeline(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from horizonrl.ops.studies import timeline

    return timeline.run(arguments.run_dir, arguments.svg_file)
