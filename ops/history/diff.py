"""`horizonrl history diff`: the first step at which two runs differ, and why.

Ledgers and recorded configs name the step: they have digests of each step's data and weights. Only that step's groups
are then read: from the group logs if both are there, else from the episodes that both directories keep.
"""

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from horizonrl.common.config.changes import config_changes
from horizonrl.common.config.schema import RunConfig
from horizonrl.common.errors import BrokerError, ConfigError
from horizonrl.common.logs import configure_logs
from horizonrl.common.run_dir import episode_file
from horizonrl.common.types import Group
from horizonrl.learner.records.journal import readable_episode
from horizonrl.ops.history.lineage import ledger_files
from horizonrl.ops.history.replay import SAME, divide, open_log, read_log
from horizonrl.ops.rundir.directory import check_broker_named
from horizonrl.ops.rundir.episodes import EpisodeFiles
from horizonrl.ops.rundir.files import Line, TicketEnd

QUIET = (
    *SAME,
    "broker.",
    "imitation.steps",
    "learner.checkpoint_every",
    "learner.keep_",
    "metrics.",
    "rl.steps",
    "run.name",
)
"""Keys that begin with these are only named where something else differs too: a run may be cut into parts by them."""
DIGESTS = {"data": "data_digest", "bits": "weights_digest"}
"""By kind of cause, the key of the ledger."""


@dataclass(frozen=True)
class DiffRequest:
    run_dirs: Sequence[Path]
    steps: Sequence[int] | None
    """The two steps to compare, of one run or one of each; None finds the first that differs."""
    json_file: Path | None
    overrides: Sequence[str]


@dataclass(frozen=True)
class RecordedStep:
    """What a run directory says of a step."""

    run_dir: Path
    line: Line
    """Of the ledger."""
    config: RunConfig
    recipe: Mapping[str, Any]
    """The config as tables."""
    machine: Mapping[str, Any]
    ends: Mapping[str, TicketEnd]
    """How the tickets of the run ended."""

    @property
    def tickets(self) -> list[str]:
        return [ticket for _, ticket in self.line["trained"]]


class Cause(NamedTuple):
    kind: str
    """`recipe`, `code`, `data` or `bits`."""
    what: str
    first: Any
    second: Any


Episodes = Mapping[str, Sequence[Mapping[str, Any]]]
"""The episodes of each ticket, as the run directory keeps them."""


def show_difference(request: DiffRequest) -> int:
    """Print the first difference of two runs, or that of the steps asked for; return 1 if there is one, else 0."""
    configure_logs(run="history", role="diff")
    runs = [recorded_steps(run_dir, request.overrides) for run_dir in request.run_dirs]
    if len(runs) == 1 and request.steps is not None:
        runs *= 2
    if len(runs) != 2:
        raise ConfigError("give two run directories, or one and --at STEP STEP")
    first, second = runs
    common = sorted(first.keys() & second.keys())
    pairs = list(zip(common, common, strict=True))
    if request.steps is not None:
        pairs = [(request.steps[0], request.steps[1])]
    for step, other in pairs:
        sides = _step(first, step), _step(second, other)
        if causes := compare(*sides):
            break
    causes, unknown = asyncio.run(_explain(causes, *sides))
    print("\n".join(_lines(runs, sides, causes, unknown)))
    if request.json_file is not None:
        report = {
            "equal": not causes,
            "steps": [side.line["step"] for side in sides],
            "causes": [cause._asdict() for cause in causes],
            "not_compared": unknown,
        }
        request.json_file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return int(bool(causes))


def recorded_steps(run_dir: Path, overrides: Sequence[str] = ()) -> dict[int, RecordedStep]:
    """Return what a run directory says of each step in its ledger."""
    files = ledger_files(run_dir)
    machines = {start["lineage"]: start.get("machine", {}) for start in files.lineages}
    ends = {end.ticket: end for end in files.ends()}
    steps = {}
    for part in divide(run_dir, overrides, files.ledger, files.lineages):
        check_broker_named(part.config, run_dir, overrides)
        recipe = part.config.model_dump(mode="json")
        for line in part.ledger:
            machine = machines.get(line["lineage"], {})
            steps[line["step"]] = RecordedStep(run_dir, line, part.config, recipe, machine, ends)
    return steps


def _step(run: Mapping[int, RecordedStep], step: int) -> RecordedStep:
    if step not in run:
        raise ConfigError(
            f"no step {step} in the ledger of {run[1].run_dir}: it holds 1 to {len(run)}"
        )
    return run[step]


def compare(first: RecordedStep, second: RecordedStep) -> list[Cause]:
    """Return how two steps differ by what is recorded of them; nothing if they do not."""
    changes = config_changes(first.recipe, second.recipe)
    quiet = {key: pair for key, pair in changes.items() if key.startswith(QUIET)}
    causes = [Cause("recipe", key, *pair) for key, pair in changes.items() if key not in quiet]
    # An older release says nothing of what it did not record.
    shared = first.machine.keys() & second.machine.keys()
    machines = [{key: step.machine[key] for key in shared} for step in (first, second)]
    causes += [Cause("code", key, *pair) for key, pair in config_changes(*machines).items()]
    for kind, digest in DIGESTS.items():
        if first.line[digest] != second.line[digest]:
            causes.append(Cause(kind, digest, first.line[digest], second.line[digest]))
    return causes and [*causes, *(Cause("recipe", key, *pair) for key, pair in quiet.items())]


async def _explain(
    causes: Sequence[Cause], first: RecordedStep, second: RecordedStep
) -> tuple[list[Cause], list[str]]:
    """Return the causes, with the group or token in place of the data's digest, and what could not be compared."""
    explained, unknown = list(causes), []
    for number, cause in enumerate(causes):
        if cause.kind == "data":
            located = _different_group(first, second) or await _different_token(first, second)
            explained[number] = located or cause
            if located is None:
                unknown.append(
                    f"tokens of step {first.line['step']}: the groups are gone from a group log, and their episodes "
                    "from a run directory; or they are equal, and only their rewards were shaped otherwise"
                )
    return explained, unknown


def _different_group(first: RecordedStep, second: RecordedStep) -> Cause | None:
    for number, tickets in enumerate(zip_longest(first.tickets, second.tickets), 1):
        if tickets[0] != tickets[1]:
            fates = [_fate(tickets[0], second), _fate(tickets[1], first)]
            return Cause("data", f"group {number}", *fates)
    return None


def _fate(ticket: str | None, other: RecordedStep) -> str:
    """Return a ticket with its end in the other run."""
    if ticket is None:
        return "none"
    return f"{ticket} ({other.run_dir.name}: {other.ends.get(ticket, 'no end')})"


async def _different_token(first: RecordedStep, second: RecordedStep) -> Cause | None:
    """Return the first token, observation or reward that differs; None if the groups are equal or not to be had."""
    for read in (_from_log, _from_files):
        episodes = [await read(step) for step in (first, second)]
        if all(first.tickets == list(tickets) for tickets in episodes):
            return _first_difference(*episodes)
    return None


async def _from_log(step: RecordedStep) -> Episodes:
    """Return the episodes that a step trained, from the group log; fewer if that is gone."""
    sequences = {sequence for sequence, _ in step.line["trained"]}
    episodes: dict[str, list[dict[str, Any]]] = {}
    try:
        async with open_log(step.run_dir, step.config) as (_, log):
            entries = read_log(log, min(sequences), max(sequences))
            async for entry in entries:
                if entry.sequence in sequences and isinstance(group := entry.record, Group):
                    episodes[group.ticket.ticket_id] = [
                        readable_episode(group, index, None) for index in range(len(group.episodes))
                    ]
    except (BrokerError, ConfigError):
        return {}
    return episodes


async def _from_files(step: RecordedStep) -> Episodes:
    """Return the episodes that a step trained, from the run directory, as far as it keeps them."""
    files = EpisodeFiles(step.run_dir)
    wanted = episode_file(step.run_dir, "step", step.line["step"])
    files.files = [file for file in files.files if file == wanted]
    kept = {ticket: records for _, ticket, records in files.groups()}
    return {ticket: kept[ticket] for ticket in step.tickets if ticket in kept}


def _first_difference(first: Episodes, second: Episodes) -> Cause | None:
    for ticket in first:
        for index, pair in enumerate(zip(first[ticket], second[ticket], strict=False)):
            facts = zip_longest(*map(_facts, pair), fillvalue=("", None))
            for (what, value), (other_what, other) in facts:
                if (what, value) != (other_what, other):
                    where = f"{ticket}, episode {index}, {what or other_what}"
                    return Cause("data", where, value, other)
    return None


def _facts(episode: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield what a step trains of an episode, in the order of its tokens."""
    yield "prompt", episode["prompt"]
    for number, turn in enumerate(episode["turns"]):
        versions = [version for version, _, tokens in turn["spans"] for _ in range(tokens)]
        columns = {"id": turn["ids"], "logprob": turn["logprobs"], "version": versions}
        for token, values in enumerate(zip(*columns.values(), strict=True)):
            for name, value in zip(columns, values, strict=True):
                yield f"turn {number}, {name} of token {token}", value
        for name in ("observation", "reward", "branch", "trained"):
            yield f"turn {number}, {name}", turn.get(name)
    yield "stop", episode["stop"]


def _lines(
    runs: Sequence[Mapping[int, RecordedStep]],
    sides: Sequence[RecordedStep],
    causes: Sequence[Cause],
    unknown: Sequence[str],
) -> Iterator[str]:
    names = [str(side.run_dir) for side in sides]
    steps = [side.line["step"] for side in sides]
    if not causes:
        lengths = sorted(map(len, runs))
        further = f"; one of them has {lengths[1]}" if lengths[0] < lengths[1] else ""
        yield f"no difference up to step {steps[0]}{further}"
        return
    if names[0] == names[1] or steps[0] != steps[1]:
        yield f"step {steps[0]} of {names[0]} → step {steps[1]} of {names[1]}"
    else:
        yield f"step {steps[0]} is the first that differs: {names[0]} → {names[1]}"
    for cause in causes:
        yield f"  {cause.kind:7} {cause.what}: {cause.first} → {cause.second}"
    for reason in unknown:
        yield f"  not compared: {reason}"
