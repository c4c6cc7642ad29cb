"""`history`: what made a version, where two runs part, and runs that go on from any step of another."""

import argparse
from pathlib import Path

from horizonrl.ops.cli.help import (
    CommandParser,
    Commands,
    add_json,
    add_run_dir,
    make_request,
    option,
    switch,
)

TITLE = "Version control"


def add(commands: Commands) -> None:
    description = "Trace, compare and rebuild what a run was trained on."
    verbs = commands.add_group("history", description, "VERB")
    _add_lineage(verbs)
    _add_replay(verbs)
    _add_counterfactual(verbs)
    _add_diff(verbs)
    _add_checkout(verbs)
    _add_bisect(verbs)
    _add_fork(verbs)
    _add_revert(verbs)
    _add_audit(verbs)
    description = (
        "Check the ledger of a finished run against its whole log. "
        "Exit code 1: a ticket was lost, doubled or trained too late, or the two disagree."
    )
    add_run_dir(verbs.add("verify", description, _verify))


def _add_lineage(verbs: Commands) -> None:
    description = "Show the groups that made a version, or what became of a ticket."
    lineage = verbs.add("lineage", description, _lineage, overrides=False)
    add_run_dir(lineage)
    wanted = lineage.add_mutually_exclusive_group(required=True)
    option(wanted, "--version", "N", "the version that step N made", type=int)
    option(wanted, "--ticket", "ID", "a ticket's id, such as train-00000042")


def _lineage(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from horizonrl.ops.history.lineage import show_ticket, show_version

    if arguments.ticket is not None:
        return show_ticket(arguments.run_dir, arguments.ticket)
    return show_version(arguments.run_dir, arguments.version)


def _add_replay(verbs: Commands) -> None:
    description = "Retrain steps from a checkpoint and the log; compare digests."
    replay = verbs.add("replay", description, _replay)
    _add_steps(replay)
    add_json(replay, "comparison")


def _add_steps(command: CommandParser) -> None:
    add_run_dir(command)
    text = "step of a kept checkpoint, or 0"
    option(command, "--from", "STEP", text, dest="first", type=int, required=True)
    text = "last step; that of the ledger by default"
    option(command, "--to", "STEP", text, dest="last", type=int)


def _replay(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from horizonrl.ops.history.replay import ReplayRequest, replay_run

    return replay_run(make_request(ReplayRequest, arguments, overrides=overrides))


def _add_counterfactual(verbs: Commands) -> None:
    description = (
        "Train other objectives on the groups of a run. "
        "Nothing is played; the table says from which step on the groups are too far off-policy."
    )
    counterfactual = verbs.add("counterfactual", description, _counterfactual)
    _add_steps(counterfactual)
    text = "keys of the objective, such as loss.kind=cispo; each --set is a variant"
    option(
        counterfactual,
        "--set",
        "KEY=VALUE",
        text,
        dest="variants",
        nargs="+",
        action="append",
        required=True,
    )
    text = "directory for the last weights of the variants: 1, 2, ..."
    option(counterfactual, "--out", "DIR", text, type=Path)
    add_json(counterfactual, "steps of the variants")


def _counterfactual(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from horizonrl.ops.history.counterfactual import CounterfactualRequest, train_variants

    return train_variants(make_request(CounterfactualRequest, arguments, overrides=overrides))


def _add_diff(verbs: Commands) -> None:
    description = (
        "Show the first step at which two runs differ, and why. "
        "Exit code 0: no difference; 1: there is one; 2: they cannot be compared."
    )
    diff = verbs.add("diff", description, _diff)
    option(diff, "run_dirs", "RUN_DIR", "the two runs", nargs="+", type=Path)
    option(
        diff,
        "--at",
        "STEP",
        "compare these two steps: of one run, or the first of one and the second of the other",
        dest="steps",
        nargs=2,
        type=int,
    )
    add_json(diff, "difference")


def _diff(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from horizonrl.ops.history.diff import DiffRequest, show_difference

    return show_difference(make_request(DiffRequest, arguments, overrides=overrides))


def _add_checkout(verbs: Commands) -> None:
    description = (
        "Write the weights of any version as a Hugging Face directory. "
        "They are those of a kept file, or are made again from a checkpoint and the log."
    )
    checkout = verbs.add("checkout", description, _checkout)
    add_run_dir(checkout)
    option(checkout, "--version", "N", "the version that step N made", type=int, required=True)
    option(checkout, "--out", "DIR", "the directory to write", type=Path, required=True)


def _checkout(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from horizonrl.ops.history.checkout import check_out

    return check_out(arguments.run_dir, arguments.version, arguments.out, overrides)


def _add_bisect(verbs: Commands) -> None:
    description = (
        "Find the first version that shows a behaviour. "
        "A test is a shell command that ends with 1 if a version shows it and with 0 if not."
    )
    bisect = verbs.add("bisect", description, _bisect)
    add_run_dir(bisect)
    text = "the test; {model} is a version's directory, {episodes} the file it was trained on, {version} its number"
    option(bisect, "--test", "COMMAND", text, dest="command", required=True)
    option(
        bisect, "--without", "N", "a version that does not show it; the first by default", type=int
    )
    option(bisect, "--shown", "N", "a version that shows it; the last by default", type=int)
    text = "share of tests that answer wrongly; versions are tested again until 95 % is reached"
    option(bisect, "--noise", "SHARE", text, type=float, default=0.0)


def _bisect(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from horizonrl.ops.history.bisect import BisectRequest, bisect

    return bisect(make_request(BisectRequest, arguments, overrides=overrides))


def _add_fork(verbs: Commands) -> None:
    description = (
        "Make a run that goes on from a checkpoint of another. "
        "Keys that you set hold from there on; the run shares the checkpoint's files."
    )
    fork = verbs.add("fork", description, _fork)
    add_run_dir(fork)
    option(fork, "--at", "STEP", "step of a kept checkpoint", dest="step", type=int, required=True)
    _add_name(fork)
    switch(fork, "--same-groups", "train first what the log has after that step, then new groups")


def _add_revert(verbs: Commands) -> None:
    description = (
        "Make a run that has never seen some groups. "
        "It goes on from the checkpoint before the first of them, with the same log but for them."
    )
    revert = verbs.add("revert", description, _revert)
    add_run_dir(revert)
    text = "env, task, ticket, actor or text (of a turn) with a pattern, such as text=*hack*; all have to match"
    option(revert, "--groups", "KEY=PATTERN", text, dest="words", nargs="+", required=True)
    _add_name(revert)


def _add_audit(verbs: Commands) -> None:
    description = (
        "Check a share of the groups against environment, weights and clocks. "
        "Exit code 0: no lie; 1: there is one, and its actor is named; 2: nothing can be audited."
    )
    audit = verbs.add("audit", description, _audit)
    add_run_dir(audit)
    text = "share of the groups that are drawn"
    option(audit, "--share", "SHARE", text, type=float, default=0.05)
    option(audit, "--seed", "N", "seed of the draw; by default another one each time", type=int)
    text = "draw from the groups that `history revert` would remove by these words"
    option(audit, "--groups", "KEY=PATTERN", text, dest="words", nargs="+", default=[])
    add_json(audit, "verdicts")


def _add_name(command: CommandParser) -> None:
    option(command, "--name", "NAME", "of the new run, which lies next to the other")


def _fork(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from horizonrl.ops.history.fork import ForkRequest, fork

    request = make_request(ForkRequest, arguments, overrides=overrides)
    return fork(request, arguments.step, with_log=arguments.same_groups)


def _revert(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from horizonrl.ops.history.fork import ForkRequest, revert

    return revert(make_request(ForkRequest, arguments, overrides=overrides), arguments.words)


def _audit(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from horizonrl.ops.history.audit import AuditRequest, audit

    return audit(make_request(AuditRequest, arguments, overrides=overrides))


def _verify(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from horizonrl.ops.history.verify import verify

    return verify(arguments.run_dir, overrides)
