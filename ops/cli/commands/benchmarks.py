"""`bench` and `study`: what the system costs, and what it learns."""

import argparse
from pathlib import Path

from horizonrl.ops.cli.help import (
    Commands,
    add_json,
    add_run_dir,
    integers,
    make_request,
    new_file,
    option,
    switch,
)

TITLE = "Measure"


def add(commands: Commands) -> None:
    _add_bench(commands)
    description = (
        "Train a study's variants under its seeds and compare them; look back at finished runs."
    )
    studies = commands.add_group("study", description, "NAME")
    _add_learning(studies)
    _add_timeline(studies)


def _add_bench(commands: Commands) -> None:
    description = "Measure HorizonRL's speed and memory beside what you would pick instead."
    bench = commands.add("bench", description, _bench, overrides=False)
    text = (
        "learner, rollouts, queues, starts (by default these four), durability, weights, envs, "
        "or envs:ID for one environment"
    )
    option(bench, "rows", "ROWS", text, nargs="*")
    switch(bench, "--small", "seconds instead of minutes, to see that it works")
    option(bench, "--model", "NAME", "SmolLM2 by default")
    add_json(bench, "result")


def _add_learning(studies: Commands) -> None:
    description = "Train a study's variants under its seeds; compare them."
    learning = studies.add("learning", description, _learning, keys=True)
    # Not `study`, which names the command.
    option(learning, "file", "STUDY", "a TOML file, or a name in ops/recipes/studies", type=Path)
    option(
        learning,
        "--directory",
        "DIR",
        "the study's runs; a study in DIR is resumed",
        type=Path,
        required=True,
    )
    option(learning, "--phase", "NAME", "a phase of the study, such as screen, confirm or small")
    option(learning, "--seeds", "N,N", "only these of the study's seeds", type=integers, default=())
    option(
        learning,
        "--only",
        "VARIANT",
        "only these variants; ppo-* matches several",
        nargs="+",
        default=(),
    )
    switch(learning, "--report-only", "train nothing; report the runs that finished")


def _add_timeline(studies: Commands) -> None:
    description = "Show where each second of a finished run went, by role."
    timeline = studies.add("timeline", description, _timeline, overrides=False)
    add_run_dir(timeline, "the directory of a run of `horizonrl train`")
    option(
        timeline, "--svg", "FILE", "draw it, one lane for each role", dest="svg_file", type=new_file
    )


def _bench(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from horizonrl.ops.bench.case import Request
    from horizonrl.ops.bench.run import run

    return run(arguments.rows, Request(arguments.small, model=arguments.model), arguments.json_file)


def _learning(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from horizonrl.ops.studies.run import StudyRequest, run

    return run(make_request(StudyRequest, arguments, overrides=overrides))


def _timeline(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from horizonrl.ops.studies import timeline

    return timeline.run(arguments.run_dir, arguments.svg_file)
