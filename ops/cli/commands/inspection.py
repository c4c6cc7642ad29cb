"""Commands that look at a run and change nothing in it."""

import argparse
from pathlib import Path

from horizonrl.common.errors import ConfigError
from horizonrl.ops.cli.help import (
    Commands,
    add_run_dir,
    make_request,
    new_file,
    number_within,
    option,
    switch,
)

TITLE = "Watch and inspect"


def add(commands: Commands) -> None:
    _add_status(commands)
    _add_report(commands)
    description = "Send a run's metrics to TensorBoard, Weights & Biases or trackio. Set which one with --tracker.kind."
    track = commands.add("track", description, _track)
    add_run_dir(track)
    switch(track, "--follow", "keep going until SIGTERM, as a running learner does")


def _add_status(commands: Commands) -> None:
    status = commands.add(
        "status",
        "Show how a run is doing: is it learning, is it moving, what waits for what, what broke. "
        "Reads a run directory, or the broker of a run elsewhere.",
        _status,
    )
    option(
        status,
        "places",
        "RUN_DIR",
        "the run directory; for a run elsewhere, its recipes",
        nargs="*",
        type=Path,
    )
    option(status, "--run", "NAME", "name of a run on the broker at --broker.url")
    switch(status, "--watch", "keep going until Ctrl-C")
    switch(status, "--json", "print JSON; with --watch, a line per look", dest="as_json")


def _status(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from horizonrl.ops.observe.status import StatusRequest, show_status

    return show_status(make_request(StatusRequest, arguments, overrides=overrides))


def _add_report(commands: Commands) -> None:
    report = commands.add(
        "report",
        "Write a run or an evaluation as one HTML page: curves, tables, and every episode to read. "
        "Of several, write a comparison: curves overlaid, and differences to the first one with intervals.",
        _report,
    )
    option(report, "places", "DIR", "a run, or what `horizonrl eval` wrote", nargs="+", type=Path)
    option(
        report,
        "--out",
        "FILE",
        "DIR/report.html by default; of several, comparison.html",
        type=new_file,
    )
    switch(
        report, "--watch", "serve the page of a run that goes on to this machine, and keep it fresh"
    )
    option(
        report, "--port", "N", "with --watch; a free one by default", type=number_within(0, 65535)
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
