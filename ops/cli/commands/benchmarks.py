"""`bench`: what the system withstands, costs and learns."""

import argparse
from pathlib import Path

from horizonrl.ops.cli.help import CommandParser, Commands, bounded, integers

TITLE = "Benchmark"


def add(commands: Commands) -> None:
    bench = commands.add("bench", "Measure what the system withstands, costs and learns.", _no_name)
    benchmarks = Commands(bench.add_subparsers(dest="bench", required=True, metavar="NAME", help="one of those below"))
    _add_faults(benchmarks)
    _add_speed(benchmarks)
    _add_learning(benchmarks)
    _add_weights(benchmarks)
    _add_followers(benchmarks)
    bench.epilog = f"benchmarks:\n{benchmarks.listed()}"
    bench.formatter_class = argparse.RawDescriptionHelpFormatter


def _no_name(arguments: argparse.Namespace, overrides: list[str]) -> int:
    raise AssertionError("the parser requires a NAME")


def _add_faults(benchmarks: Commands) -> None:
    description = "Kill, stop, delay and repeat at random; check that nothing is lost."
    chaos = benchmarks.add("chaos", description, _chaos, keys=True)
    chaos.add_argument(
        "--kills", type=bounded(1), default=20, metavar="N", help="events, at least a sixth of them for each role; 20"
    )
    chaos.add_argument(
        "--engine", choices=("scripted", "vllm"), default="scripted", help="the actors' engine; scripted by default"
    )
    soak = benchmarks.add("soak", "Run undisturbed at full speed; show what grows.", _soak, keys=True)
    soak.add_argument("--minutes", type=bounded(0.1), default=60.0, metavar="M", help="60 by default")
    for command in (chaos, soak):
        command.add_argument("--directory", type=Path, metavar="DIR", help="a new directory; temporary by default")
    description = "Send the broker's readers payloads that no writer would write."
    fuzz = benchmarks.add("fuzz", description, _fuzz, overrides=False)
    fuzz.add_argument("--payloads", type=bounded(1), default=10_000, metavar="N", help="10000 by default")
    for command in (chaos, soak, fuzz):
        command.add_argument("--seed", type=int, default=0, metavar="S", help="0 by default")
        _add_json(command)


def _add_speed(benchmarks: Commands) -> None:
    broker = benchmarks.add("broker", "Measure what an fsync for every message costs.", _broker, overrides=False)
    _add_json(broker)
    description = "Measure each environment's speed, memory and event-loop lag. Each is played in process and served."
    envs = benchmarks.add("envs", description, _envs, overrides=False)
    envs.add_argument("only", nargs="*", metavar="ID", help="only these; all that are installed by default")
    envs.add_argument(
        "--seconds", type=bounded(0.1), default=3.0, metavar="S", help="for each of the six measurements; 3 by default"
    )
    _add_json(envs)


def _add_learning(benchmarks: Commands) -> None:
    description = "Train a study's variants under its seeds; compare them."
    learning = benchmarks.add("learning", description, _learning, keys=True)
    learning.add_argument("study", type=Path, metavar="STUDY", help="a TOML file, or a name in ops/recipes/studies")
    learning.add_argument(
        "--directory", type=Path, required=True, metavar="DIR", help="the study's runs; a study in DIR is resumed"
    )
    learning.add_argument("--seeds", type=integers, default=(), metavar="N,N", help="only these of the study's seeds")
    learning.add_argument(
        "--only", nargs="+", default=(), metavar="VARIANT", help="only these variants; ppo-* matches several"
    )
    learning.add_argument("--report-only", action="store_true", help="train nothing; report the runs that finished")


def _add_weights(benchmarks: Commands) -> None:
    description = "Measure what a version's changes take, against their entropy and other forms."
    weights = benchmarks.add("weights", description, _weights, overrides=False)
    weights.add_argument(
        "--frames",
        nargs=2,
        type=Path,
        metavar=("OLD", "NEW"),
        help="two safetensors files; made by training by default",
    )
    weights.add_argument(
        "--directory", type=Path, metavar="DIR", help="keeps the frames that are made; ~/.cache/horizonrl/bench-weights"
    )
    weights.add_argument("--small", action="store_true", help="a tiny random model instead of SmolLM2")
    _add_json(weights)


def _add_followers(benchmarks: Commands) -> None:
    description = "Measure what a server sends per version to many followers of the weights."
    followers = benchmarks.add("followers", description, _followers, overrides=False)
    followers.add_argument("--followers", type=bounded(1), default=200, metavar="N", help="200 by default")
    followers.add_argument("--per-host", type=bounded(1), default=20, metavar="N", help="that share an image; 20")
    followers.add_argument(
        "--frame-bytes", type=bounded(2), default=4 << 20, metavar="N", help="size of the weights; 4 MiB by default"
    )
    _add_json(followers)


def _followers(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from horizonrl.ops.bench.speed import followers

    return followers.run(arguments.json_file, arguments.followers, arguments.per_host, arguments.frame_bytes)


def _add_json(command: CommandParser) -> None:
    command.add_argument("--json", dest="json_file", type=Path, metavar="FILE", help="write the result to a file")


def _chaos(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from horizonrl.ops.bench.faults import chaos

    overrides = [f"--actor.engine={arguments.engine}", *overrides]
    return chaos.run(arguments.kills, arguments.seed, arguments.json_file, arguments.directory, overrides)


def _soak(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from horizonrl.ops.bench.faults import soak

    return soak.run(arguments.minutes, arguments.seed, arguments.json_file, arguments.directory, overrides)


def _fuzz(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from horizonrl.ops.bench.faults import fuzz

    return fuzz.run(arguments.payloads, arguments.seed, arguments.json_file)


def _broker(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from horizonrl.ops.bench.speed import broker

    return broker.run(arguments.json_file)


def _envs(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from horizonrl.ops.bench.speed import envs

    return envs.run(arguments.json_file, arguments.only, arguments.seconds)


def _learning(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from horizonrl.ops.bench.learning.run import StudyRequest, run

    request = StudyRequest(
        study=arguments.study,
        directory=arguments.directory,
        seeds=arguments.seeds,
        only=arguments.only,
        report_only=arguments.report_only,
        overrides=overrides,
    )
    return run(request)


def _weights(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from horizonrl.ops.bench.weights import run

    return run.run(arguments.json_file, arguments.frames, arguments.directory, arguments.small)
