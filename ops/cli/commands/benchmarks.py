"""`bench`: what the system withstands, costs and learns."""

import argparse
from pathlib import Path

from horizonrl.ops.cli.help import CommandParser, Commands, bounded, integers, new_file

TITLE = "Benchmark"


def add(commands: Commands) -> None:
    bench = commands.add("bench", "Measure what the system withstands, costs and learns.", _no_name)
    benchmarks = Commands(bench.add_subparsers(dest="bench", required=True, metavar="NAME", help="one of those below"))
    _add_speed(benchmarks)
    _add_learning(benchmarks)
    _add_sampling(benchmarks)
    _add_weights(benchmarks)
    _add_followers(benchmarks)
    _add_memory(benchmarks)
    _add_gateway(benchmarks)
    bench.epilog = f"benchmarks:\n{benchmarks.listed()}"
    bench.formatter_class = argparse.RawDescriptionHelpFormatter


def _no_name(arguments: argparse.Namespace, overrides: list[str]) -> int:
    raise AssertionError("the parser requires a NAME")


def _add_speed(benchmarks: Commands) -> None:
    broker = benchmarks.add(
        "broker", "Measure what an fsync for every message costs, and what replicas do.", _broker, overrides=False
    )
    _add_json(broker)
    description = "Measure each environment's speed, memory and event-loop lag. Each is played in process and served."
    envs = benchmarks.add("envs", description, _envs, overrides=False)
    envs.add_argument("only", nargs="*", metavar="ID", help="only these; all that are installed by default")
    envs.add_argument(
        "--seconds", type=bounded(0.1), default=3.0, metavar="S", help="for each of the six measurements; 3 by default"
    )
    _add_json(envs)
    description = "Measure the performance table: HorizonRL against what a user would pick instead."
    speed = benchmarks.add("speed", description, _speed, overrides=False)
    speed.add_argument("--small", action="store_true", help="a small variant of every row, in seconds, for CI")
    speed.add_argument("--only", metavar="ROWS", help="one group of rows, such as queues; all by default")
    _add_json(speed)
    description = "Show where each second of a finished run went, by role."
    timeline = benchmarks.add("timeline", description, _timeline, overrides=False)
    timeline.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the directory of a run of `horizonrl train`")
    timeline.add_argument(
        "--svg", dest="svg_file", type=new_file, metavar="FILE", help="draw it, one lane for each role"
    )


def _add_learning(benchmarks: Commands) -> None:
    description = "Train a study's variants under its seeds; compare them."
    learning = benchmarks.add("learning", description, _learning, keys=True)
    learning.add_argument("study", type=Path, metavar="STUDY", help="a TOML file, or a name in ops/recipes/studies")
    learning.add_argument(
        "--directory", type=Path, required=True, metavar="DIR", help="the study's runs; a study in DIR is resumed"
    )
    learning.add_argument("--phase", metavar="NAME", help="a phase of the study, such as screen, confirm or small")
    learning.add_argument("--seeds", type=integers, default=(), metavar="N,N", help="only these of the study's seeds")
    learning.add_argument(
        "--only", nargs="+", default=(), metavar="VARIANT", help="only these variants; ppo-* matches several"
    )
    learning.add_argument("--report-only", action="store_true", help="train nothing; report the runs that finished")
    learning.add_argument(
        "--with",
        dest="earlier",
        nargs="+",
        type=Path,
        default=(),
        metavar="FILE",
        help="a results.json of another machine, sitting or study: runs of the same config are not trained again",
    )


def _add_sampling(benchmarks: Commands) -> None:
    description = "What other ways of sampling groups would have cost some runs."
    sampling = benchmarks.add("sampling", description, _sampling, overrides=False)
    sampling.add_argument("run_dirs", nargs="+", type=Path, metavar="RUN_DIR", help="runs with their episodes")
    _add_json(sampling)


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


def _add_memory(benchmarks: Commands) -> None:
    description = "Measure the learner's memory, and how it grows with the length of an episode."
    memory = benchmarks.add("memory", description, _memory, overrides=False)
    memory.add_argument(
        "--tokens",
        type=integers,
        default=(4096, 8192, 16_384, 32_768),
        metavar="N,...",
        help="4096 to 32768 by default",
    )
    memory.add_argument("--model", metavar="NAME", help="a model as model.name names it; a tiny one by default")
    _add_json(memory)


def _memory(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from horizonrl.ops.bench.speed import memory

    return memory.run(arguments.tokens, arguments.model, arguments.json_file)


def _add_gateway(benchmarks: Commands) -> None:
    description = "Measure programs that call the model through the gateway against native rollouts."
    gateway = benchmarks.add("gateway", description, _gateway, overrides=False)
    gateway.add_argument("--small", action="store_true", help="scripted replies and no vLLM instead of SmolLM2")
    _add_json(gateway)


def _gateway(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from horizonrl.ops.bench.speed import gateway

    return gateway.run(arguments.json_file, arguments.small)


def _add_json(command: CommandParser) -> None:
    command.add_argument("--json", dest="json_file", type=new_file, metavar="FILE", help="write the result to a file")


def _broker(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from horizonrl.ops.bench.speed import broker

    return broker.run(arguments.json_file)


def _envs(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from horizonrl.ops.bench.speed import envs

    return envs.run(arguments.json_file, arguments.only, arguments.seconds)


def _speed(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from horizonrl.ops.bench.table import run
    from horizonrl.ops.bench.table.rows import Request

    return run.run(Request(arguments.small), arguments.json_file, arguments.only)


def _timeline(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from horizonrl.ops.bench.table import timeline

    return timeline.run(arguments.run_dir, arguments.svg_file)


def _sampling(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from horizonrl.ops.studies import sampling

    return sampling.run(arguments.run_dirs, arguments.json_file)


def _learning(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from horizonrl.ops.studies.run import StudyRequest, run

    request = StudyRequest(
        study=arguments.study,
        directory=arguments.directory,
        seeds=arguments.seeds,
        only=arguments.only,
        phase=arguments.phase,
        report_only=arguments.report_only,
        earlier=arguments.earlier,
        overrides=overrides,
    )
    return run(request)


def _weights(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from horizonrl.ops.bench.weights import run

    return run.run(arguments.json_file, arguments.frames, arguments.directory, arguments.small)
