"""Commands that look at a run and change nothing in it."""

import argparse
from pathlib import Path

from horizonrl.common.errors import ConfigError
from horizonrl.ops.cli.help import Commands, bounded, new_file

TITLE = "Watch and inspect"


def add(commands: Commands) -> None:
    _add_status(commands)
    _add_report(commands)
    description = "Send a run's metrics to TensorBoard, Weights & Biases or trackio. Set which one with --tracker.kind."
    track = commands.add("track", description, _track)
    track.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    track.add_argument(
        "--follow", action="store_true", help="keep going until SIGTERM, as a running learner does"
    )
    _add_lineage(commands)
    _add_replay(commands)


def _add_status(commands: Commands) -> None:
    status = commands.add(
        "status",
        "Show how a run is doing: is it learning, is it moving, what waits for what, what broke. "
        "Reads a run directory, or the broker of a run elsewhere.",
        _status,
    )
    status.add_argument(
        "places",
        nargs="*",
        type=Path,
        metavar="RUN_DIR",
        help="the run directory; for a run elsewhere, its recipes",
    )
    status.add_argument("--run", metavar="NAME", help="name of a run on the broker at --broker.url")
    status.add_argument("--watch", action="store_true", help="keep going until Ctrl-C")
    status.add_argument(
        "--json",
        dest="as_json",
        action="store_true",
        help="print JSON; with --watch, a line per look",
    )


def _status(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from horizonrl.ops.observe.status import StatusRequest, show_status

    request = StatusRequest(
        places=arguments.places,
        run=arguments.run,
        overrides=overrides,
        watch=arguments.watch,
        as_json=arguments.as_json,
    )
    return show_status(request)


def _add_report(commands: Commands) -> None:
    report = commands.add(
        "report",
        "Write a run or an evaluation as one HTML page: curves, tables, and every episode to read. "
        "Of several, write a comparison: curves overlaid, and differences to the first one with intervals.",
        _report,
    )
    report.add_argument(
        "places", nargs="+", type=Path, metavar="DIR", help="a run, or what `horizonrl eval` wrote"
    )
    report.add_argument(
        "--out",
        type=new_file,
        metavar="FILE",
        help="DIR/report.html by default; of several, comparison.html",
    )
    report.add_argument(
        "--watch",
        action="store_true",
        help="serve the page of a run that goes on to this machine, and keep it fresh",
    )
    report.add_argument(
        "--port", type=bounded(0, 65535), metavar="N", help="with --watch; a free one by default"
    )


def _report(arguments: argparse.Namespace, overrides: list[str]) -> int:
    if not arguments.watch:
        if arguments.port is not None:
            raise ConfigError(
                "--port is for a page that is served: add --watch, or leave the port out"
            )
        from horizonrl.ops.report.page import write_report

        return write_report(arguments.places, arguments.out, overrides)
    if len(arguments.places) > 1 or arguments.out is not None:
        raise ConfigError(
            "--watch serves one run, and writes no file: give one RUN_DIR and no --out"
        )
    from horizonrl.ops.report.live import watch_run

    return watch_run(arguments.places[0], int(arguments.port or 0), tuple(overrides))


def _track(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from horizonrl.ops.observe.tracking import track

    return track(arguments.run_dir, overrides, follow=arguments.follow)


def _add_lineage(commands: Commands) -> None:
    description = "Show the groups that made a version, or what became of a ticket."
    lineage = commands.add("lineage", description, _lineage, overrides=False)
    lineage.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    wanted = lineage.add_mutually_exclusive_group(required=True)
    wanted.add_argument("--version", type=int, metavar="N", help="the version that step N made")
    wanted.add_argument("--ticket", metavar="ID", help="a ticket's id, such as train-00000042")


def _lineage(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from horizonrl.ops.cli.lineage import show_ticket, show_version

    if arguments.ticket is not None:
        return show_ticket(arguments.run_dir, arguments.ticket)
    return show_version(arguments.run_dir, arguments.version)


def _add_replay(commands: Commands) -> None:
    replay = commands.add(
        "replay", "Retrain steps from a checkpoint and the log; compare digests.", _replay
    )
    replay.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    replay.add_argument(
        "--from",
        dest="first",
        type=int,
        required=True,
        metavar="STEP",
        help="step of a kept checkpoint, or 0",
    )
    replay.add_argument(
        "--to",
        dest="last",
        type=int,
        metavar="STEP",
        help="last step; that of the ledger by default",
    )
    replay.add_argument(
        "--json",
        dest="json_file",
        type=new_file,
        metavar="FILE",
        help="write the comparison to a file",
    )


def _replay(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from horizonrl.ops.cli.replay import ReplayRequest, replay_run

    request = ReplayRequest(
        run_dir=arguments.run_dir,
        first=arguments.first,
        last=arguments.last,
        json_file=arguments.json_file,
        overrides=overrides,
    )
    return replay_run(request)
