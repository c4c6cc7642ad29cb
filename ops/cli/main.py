"""The command line: `horizonrl COMMAND [RECIPE...] [--section.key value ...]`.

Heavy imports come after parsing, so that `--help` answers at once.
"""

import argparse
import math
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from horizonrl.common.errors import ConfigError, HorizonError, MissingDependency, did_you_mean
from horizonrl.ops.cli.help import CommandParser, refuse_unknown

if TYPE_CHECKING:
    from horizonrl.common.config.schema import RunConfig

ROLES = ("broker", "controller", "learner", "actor")
BROKER_KEYS = "broker keys"
RECIPES = "TOML files, or names that `horizonrl recipes` lists; later ones win"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 failed, 2 would fail again as it is, 130 interrupted."""
    words = (sys.argv[1:] if argv is None else argv) or ["--help"]
    try:
        arguments, overrides = parse(words)
        _refuse_unused(arguments, overrides)
        return COMMANDS[arguments.command](arguments, overrides)
    except HorizonError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "horizonrl"):
            raise  # ours, and not there: a defect, not something to install
        print(_not_installed(words[0], package), file=sys.stderr)
        return MissingDependency.exit_code
    except BrokenPipeError:  # `horizonrl ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.filename is None:
            raise
        print(f"error: {error.filename}: {error.strerror}: give another path, or mend this one", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return a command's arguments and its overrides. Raises ConfigError, or ends the program, when they make none."""
    words, overrides = split_overrides(argv)
    if words[:2] == ["broker", "keys"]:
        words = [BROKER_KEYS, *words[2:]]
    if words and not words[0].startswith("-") and words[0] not in COMMANDS:
        known = ", ".join(COMMANDS)
        raise ConfigError(f"no command {words[0]!r}{did_you_mean(words[0], COMMANDS)} There are: {known}")
    arguments, unknown = _parser().parse_known_args(words)
    refuse_unknown(arguments.command, unknown)
    return arguments, overrides


def _not_installed(command: str, package: str) -> str:
    return (
        f"error: `horizonrl {command}` needs the package {package}, which is not installed here: "
        "pip install 'horizonrl[cpu]', or see `horizonrl doctor`"
    )


def _refuse_unused(arguments: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Raise ConfigError for a key that the command would pass over."""
    passed_over = (
        arguments.command in ("export", "dataset", "lineage", "doctor", "recipes", BROKER_KEYS)
        or (arguments.command == "envs" and arguments.action == "list")
        or (arguments.command == "bench" and arguments.bench in ("fuzz", "broker", "envs"))
    )
    if overrides and passed_over:
        raise ConfigError(
            f"{overrides[0].partition('=')[0]}: `horizonrl {arguments.command}` takes no keys of the config"
        )


def split_overrides(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Part `--section.key value` from the command's own words; `--envs` is a list of sections, set as a whole."""
    words: list[str] = []
    overrides: list[str] = []
    tokens = iter(argv)
    for token in tokens:
        flag, equals, _ = token.partition("=")
        if flag == "--envs" or (flag.startswith("--") and "." in flag):
            overrides.append(token)
            if not equals and (value := next(tokens, None)) is not None:
                overrides.append(value)
        else:
            words.append(token)
    return words, overrides


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="horizonrl",
        description="Asynchronous reinforcement learning for LLM agents on long, multi-turn tasks.",
        epilog="Any key of the config can be set with --section.key value; `horizonrl config` shows them all.",
    )
    parser.add_argument("--version", action="version", version=f"horizonrl {metadata.version('horizonrl')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in {
        "train": "everything on this machine: broker, controller, learner, actors; one console",
        "broker": "the broker alone: a nats-server with the run's streams",
        "controller": "the controller alone",
        "learner": "the learner alone; resumes from its newest checkpoint by itself",
        "actor": "one actor alone",
        "config": "print the resolved config",
    }.items():
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("recipes", nargs="*", type=Path, metavar="RECIPE", help=RECIPES)
        command.takes_keys = True
    text = "the recipes that come with the package: what each trains, or the text of some"
    named = commands.add_parser("recipes", help=text, description=text)
    named.add_argument("names", nargs="*", type=Path, metavar="NAME", help="print its text, to begin your own with")
    text = "make the keys of a secured broker: nkeys for the roles, TLS, and nats-server's configuration"
    keys = commands.add_parser(BROKER_KEYS, help=text, description=text)
    keys.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="keeps what is there, makes what is missing"
    )
    keys.add_argument("--run", action="append", default=[], metavar="NAME", help="a run that gets users; repeatable")
    keys.add_argument(
        "--host", action="append", default=[], metavar="NAME", help="name or address of the server; repeatable"
    )
    keys.add_argument(
        "--actors", type=int, default=1, metavar="N", help="how many actors of each named run get a key: one by default"
    )
    keys.add_argument(
        "--seen-at", type=Path, metavar="DIR", help="where nats-server will find the folder, if elsewhere"
    )
    text = "is it learning, is it moving, what waits for what, what broke: from a run directory, or from a broker"
    status = commands.add_parser("status", help=text, description=text)
    status.add_argument("places", nargs="*", type=Path, metavar="RUN_DIR", help="or the recipes of a run elsewhere")
    status.add_argument("--run", metavar="NAME", help="a run on the broker given with --broker.url; or --run.name")
    status.add_argument("--watch", action="store_true", help="go on until Ctrl-C")
    status.add_argument("--json", dest="as_json", action="store_true", help="for programs; with --watch a line each")
    export = commands.add_parser("export", help="write the newest or the best weights as a Hugging Face directory")
    export.add_argument("run_dir", type=Path)
    export.add_argument("out", type=Path)
    export.add_argument("--best", action="store_true", help="the version with the best evaluation")
    dataset = commands.add_parser("dataset", help="write a run's episodes as a dataset: JSON lines, schema, card")
    dataset.add_argument("run_dir", type=Path)
    dataset.add_argument("out", type=Path)
    for shared in (export, dataset):
        shared.add_argument("--push", metavar="OWNER/NAME", help="upload it to the Hugging Face Hub, with HF_TOKEN")
        shared.add_argument("--public", action="store_true", help="with --push: a new repository is not private")
    replay = commands.add_parser("replay", help="retrain steps from a checkpoint and the log; compare the digests")
    replay.add_argument("run_dir", type=Path)
    replay.add_argument("--from", dest="first", type=int, required=True, metavar="STEP", help="a kept checkpoint, or 0")
    replay.add_argument("--to", dest="last", type=int, metavar="STEP", help="the last step; the ledger's by default")
    replay.add_argument("--json", dest="json_file", type=Path, metavar="FILE", help="write the comparison to a file")
    lineage = commands.add_parser("lineage", help="the groups that made a version, or what became of a ticket")
    lineage.add_argument("run_dir", type=Path)
    wanted = lineage.add_mutually_exclusive_group(required=True)
    wanted.add_argument("--version", type=int, metavar="N")
    wanted.add_argument("--ticket", metavar="ID", help="such as train-00000042")
    report = commands.add_parser("report", help="write one HTML page of a run: curves, and every episode to read")
    report.add_argument("run_dir", type=Path)
    report.add_argument("--out", type=Path, metavar="FILE", help="RUN_DIR/report.html by default")
    track = commands.add_parser("track", help="hand a run's metrics to tensorboard, wandb or trackio (--tracker.kind)")
    track.add_argument("run_dir", type=Path)
    track.add_argument("--follow", action="store_true", help="go on until SIGTERM; a learner does so by itself")
    envs = commands.add_parser("envs", help="list, check or serve the environments")
    envs.add_argument("action", choices=("list", "check", "serve"))
    envs.add_argument("env_ids", nargs="*", metavar="ID", help="its options: --options.KEY VALUE; of several: --ID.KEY")
    serve = envs.add_argument_group("serve, over the HTTP protocol of AgentGym's servers")
    serve.add_argument("--host", default="127.0.0.1", help="who may call: this machine alone by default")
    serve.add_argument("--port", type=_least(0, 65535), default=36001, metavar="N", help="0 for a free one")
    serve.add_argument("--workers", type=_least(0), default=0, metavar="N", help="processes that play; none by default")
    serve.add_argument(
        "--capacity", type=_least(1), default=1024, metavar="N", help="episodes of an environment at a time"
    )
    serve.add_argument(
        "--ttl", type=_least(1.0), default=1800.0, metavar="S", help="seconds until an idle episode is closed"
    )
    serve.add_argument(
        "--allow-host", action="append", default=[], metavar="NAME", help="a name by which clients call it; repeatable"
    )
    serve.add_argument("--compatible", action="store_true", help="errors as AgentGym's: 200 with an error in it")
    demos = commands.add_parser("demos", help="write an expert's demonstrations as conversations (JSONL)")
    demos.add_argument("recipes", nargs="*", type=Path, metavar="RECIPE", help=RECIPES)
    demos.takes_keys = True
    demos.add_argument("--out", type=Path, required=True, metavar="FILE")
    demos.add_argument("--count", type=int, metavar="N", help="the first N tasks; all by default")
    demos.add_argument("--env", dest="env_id", metavar="ID", help="which of the recipe's envs, where it has several")
    _add_eval(commands.add_parser("eval", help="success of a model on held-out tasks, with intervals; resumable"))
    _add_bench(
        commands.add_parser(
            "bench", help="chaos, soak, fuzz, broker, envs, learning: what the system withstands, costs and learns"
        )
    )
    commands.add_parser("doctor", help="what is installed, what is missing, and the command that mends it")
    return parser


def _add_eval(command: CommandParser) -> None:
    command.description = "Of all environments that are played: --options.KEY VALUE."
    command.takes_keys = True
    command.add_argument("model", nargs="?", help="a Hugging Face directory, a run, a checkpoint, or a known name")
    command.add_argument("--endpoint", metavar="URL", help="an OpenAI-compatible one instead, such as http://HOST/v1")
    command.add_argument("--model-name", metavar="NAME", help="the model as the endpoint calls it")
    command.add_argument("--key-variable", default="OPENAI_API_KEY", metavar="NAME", help="where its key is, if any")
    command.add_argument(
        "--recipe", action="append", type=Path, default=[], metavar="FILE", help="sampling, envs; or a name"
    )
    command.add_argument("--table", action="store_true", help="the 27 tasks of the paper, on our counterparts")
    command.add_argument("--env", nargs="+", default=(), metavar="ID", help="on these; those of the recipe by default")
    command.add_argument("--split", choices=("train", "test", "all"), default="test")
    command.add_argument("--categories", nargs="+", default=(), metavar="NAME", help="only these; all by default")
    command.add_argument("--tasks", type=int, metavar="N", help="of each category; all by default")
    command.add_argument("--samples", nargs="+", type=int, default=(), metavar="K", help="episodes a task; pass@k")
    command.add_argument("--turns", nargs="+", type=int, default=(), metavar="T", help="most turns; a block a value")
    command.add_argument("--out", type=Path, default=Path("evaluation"), metavar="DIR", help="goes on with its own")


def _add_bench(bench: CommandParser) -> None:
    names = bench.add_subparsers(dest="bench", required=True, metavar="NAME")
    chaos = names.add_parser("chaos", help="kill, stop, delay and repeat at random; prove that nothing is lost")
    chaos.add_argument("--kills", type=_least(1), default=20, metavar="N", help="events, a sixth or more for each role")
    chaos.add_argument("--engine", choices=("scripted", "vllm"), default="scripted", help="what the actors sample with")
    soak = names.add_parser("soak", help="run undisturbed and at full speed; show what grows")
    soak.add_argument("--minutes", type=_least(0.1), default=60.0, metavar="M")
    fuzz = names.add_parser("fuzz", help="send the broker's readers payloads that no writer would write")
    fuzz.add_argument("--payloads", type=_least(1), default=10_000, metavar="N")
    broker = names.add_parser("broker", help="what an fsync for every message costs")
    envs = names.add_parser("envs", help="steps a second, memory and loop lag of each environment, here and served")
    envs.add_argument("only", nargs="*", metavar="ID", help="some of them; all that are installed by default")
    envs.add_argument("--seconds", type=_least(0.1), default=3.0, metavar="S", help="for each of the six measurements")
    learning = names.add_parser("learning", help="train the variants of a study under its seeds, and compare them")
    learning.add_argument("study", type=Path, metavar="STUDY", help="a TOML file, or a name in ops/recipes/studies")
    learning.add_argument("--directory", type=Path, required=True, metavar="DIR", help="of the runs; resumes its own")
    learning.add_argument("--seeds", type=_numbers, default=(), metavar="N,N", help="some of the study's")
    learning.add_argument("--only", nargs="+", default=(), metavar="VARIANT", help="some variants; ppo-* is several")
    learning.add_argument("--report-only", action="store_true", help="train nothing, report what has finished")
    for name in (chaos, soak, fuzz):
        name.add_argument("--seed", type=int, default=0, metavar="S")
    for name in (chaos, soak, fuzz, broker, envs):
        name.add_argument("--json", dest="json_file", type=Path, metavar="FILE", help="write the result to a file")
    for name in (chaos, soak, learning):
        name.takes_keys = True
    for name in (chaos, soak):
        name.add_argument("--directory", type=Path, metavar="DIR", help="a new directory; a temporary one by default")


def split_options(overrides: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Part `--options.KEY value`, of environments, from the config's own overrides."""
    from horizonrl.common.config.schema import parse_overrides

    own: list[str] = []
    tokens, options = iter(overrides), list[str]()
    for token in tokens:
        place = options if token.startswith("--options.") else own
        place.append(token if "=" in token else f"{token}={next(tokens, '')}")
    return own, parse_overrides(options).get("options", {})


def _numbers(text: str) -> tuple[int, ...]:
    if not all(part.isdecimal() for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r}: numbers separated by commas are wanted, such as 0,1,2")
    return tuple(int(part) for part in text.split(","))


def _least(least: float, most: float = math.inf) -> Callable[[str], float]:
    """Return a reader of numbers within bounds; whole ones where `least` is whole."""

    def number(text: str) -> float:
        value = type(least)(text)
        if not least <= value <= most:
            at_most = f", {most:g} at most" if most < math.inf else ""
            raise argparse.ArgumentTypeError(f"{text}: give {least:g} or more{at_most}")
        return value

    return number


def _load(recipes: Sequence[Path], overrides: Sequence[str]) -> "RunConfig":
    from horizonrl.common.config.schema import RunConfig
    from horizonrl.ops.cli.recipe_names import find_recipe

    return RunConfig.load([find_recipe(recipe) for recipe in recipes], overrides)


def _train(arguments: argparse.Namespace, overrides: list[str]) -> int:
    config = _load(arguments.recipes, overrides)
    from horizonrl.ops.cli.doctor import require_engines

    require_engines(config)
    from horizonrl.ops.run.local import train

    return train(config, resume_command=shlex.join(["horizonrl", *sys.argv[1:]]))


def _role(arguments: argparse.Namespace, overrides: list[str]) -> int:
    config = _load(arguments.recipes, overrides)
    from horizonrl.ops.run.roles import run

    return run(arguments.command, config)


def _keys(arguments: argparse.Namespace, overrides: list[str]) -> int:
    try:
        from horizonrl.broker.nats.keys import make_keys
    except ImportError as error:
        raise MissingDependency(f"{error}: run `pip install cryptography`") from None

    for path in make_keys(arguments.out, arguments.run, arguments.host, arguments.seen_at, arguments.actors):
        print(f"wrote {path}")
    return 0


def _config(arguments: argparse.Namespace, overrides: list[str]) -> int:
    config = _load(arguments.recipes, overrides)
    from horizonrl.ops.run.directory import to_toml

    print(to_toml(config), end="")
    return 0


def _recipes(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from horizonrl.ops.cli.recipe_names import show_recipes

    return show_recipes(arguments.names)


def _status(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from horizonrl.ops.observe.status import StatusRequest, show_status

    asked = (arguments.places, arguments.run, overrides)
    return show_status(StatusRequest(*asked, watch=arguments.watch, as_json=arguments.as_json))


def _export(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from horizonrl.ops.cli.terminal import plain_console
    from horizonrl.ops.cli.waiting import waiting
    from horizonrl.ops.publish.export import export_run
    from horizonrl.ops.publish.hub import push, require_push

    if arguments.push:
        require_push(arguments.push)
    with waiting(plain_console(stderr=True), f"exporting {arguments.run_dir}"):
        step = export_run(arguments.run_dir, arguments.out, best=arguments.best)
    print(f"exported step {step} to {arguments.out}")
    if arguments.push:
        print(f"pushed to {push(arguments.out, arguments.push, 'model', public=arguments.public)}")
    return 0


def _dataset(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from horizonrl.ops.publish.dataset import write_dataset
    from horizonrl.ops.publish.hub import push, require_push

    if arguments.push:
        require_push(arguments.push)
    written = write_dataset(arguments.run_dir, arguments.out)
    print(f"wrote {written.rows} episodes, {written.tokens} generated tokens, to {arguments.out}")
    if written.untold:
        print(f"left out {written.untold} episodes: an earlier version of this program wrote them without token ids")
    if written.unreadable:
        print(f"left out {written.unreadable} unreadable lines of {arguments.run_dir}/episodes")
    if arguments.push:
        print(f"pushed to {push(arguments.out, arguments.push, 'dataset', public=arguments.public)}")
    return 0


def _replay(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from horizonrl.ops.cli.replay import ReplayRequest, replay_run

    return replay_run(ReplayRequest(arguments.run_dir, arguments.first, arguments.last, arguments.json_file, overrides))


def _lineage(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from horizonrl.ops.cli.lineage import show_ticket, show_version

    if arguments.ticket is not None:
        return show_ticket(arguments.run_dir, arguments.ticket)
    return show_version(arguments.run_dir, arguments.version)


def _report(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from horizonrl.ops.report.page import write_report

    return write_report(arguments.run_dir, arguments.out, overrides)


def _track(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from horizonrl.ops.observe.tracking import track

    return track(arguments.run_dir, overrides, follow=arguments.follow)


def _envs(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from horizonrl.ops.cli import environments

    match arguments.action:
        case "serve":
            return environments.serve_environments(arguments, overrides)
        case "check":
            return environments.check_environment(arguments.env_ids, overrides)
        case _:
            return environments.list_environments(arguments.env_ids)


def _demos(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from horizonrl.ops.publish.demos import write_demonstrations

    config = _load(arguments.recipes, overrides)
    return write_demonstrations(config, arguments.out, arguments.count, arguments.env_id)


def _eval(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from horizonrl.ops.cli.recipe_names import find_recipe
    from horizonrl.ops.evaluation.plan import Choice
    from horizonrl.ops.evaluation.run import evaluate
    from horizonrl.ops.evaluation.subjects import Asked

    own, options = split_options(overrides)
    given = (arguments.model, arguments.endpoint, arguments.model_name, arguments.key_variable)
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
    code = evaluate(Asked(*given, tuple(map(find_recipe, arguments.recipe)), own), choice, arguments.out)
    if code == 130:  # an engine that is interrupted while it starts leaves threads that never end
        sys.stderr.flush()
        os._exit(code)
    return code


def _bench(arguments: argparse.Namespace, overrides: list[str]) -> int:
    if arguments.bench == "fuzz":
        from horizonrl.ops.bench.faults import fuzz

        return fuzz.run(arguments.payloads, arguments.seed, arguments.json_file)
    if arguments.bench == "broker":
        from horizonrl.ops.bench.speed import broker

        return broker.run(arguments.json_file)
    if arguments.bench == "envs":
        from horizonrl.ops.bench.speed import envs

        return envs.run(arguments.json_file, arguments.only, arguments.seconds)
    if arguments.bench == "soak":
        from horizonrl.ops.bench.faults import soak

        return soak.run(arguments.minutes, arguments.seed, arguments.json_file, arguments.directory, overrides)
    if arguments.bench == "learning":
        from horizonrl.ops.bench.learning import run as learning

        asked = (arguments.study, arguments.directory, arguments.seeds, arguments.only, arguments.report_only)
        return learning.run(learning.StudyRequest(*asked, overrides))
    from horizonrl.ops.bench.faults import chaos

    overrides = [f"--actor.engine={arguments.engine}", *overrides]
    return chaos.run(arguments.kills, arguments.seed, arguments.json_file, arguments.directory, overrides)


def _doctor(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from horizonrl.ops.cli.doctor import examine

    return examine()


COMMANDS = {
    "train": _train,
    **dict.fromkeys(ROLES, _role),
    BROKER_KEYS: _keys,
    "config": _config,
    "recipes": _recipes,
    "status": _status,
    "export": _export,
    "dataset": _dataset,
    "replay": _replay,
    "lineage": _lineage,
    "report": _report,
    "track": _track,
    "envs": _envs,
    "demos": _demos,
    "eval": _eval,
    "bench": _bench,
    "doctor": _doctor,
}

if __name__ == "__main__":
    sys.exit(main())
