"""`horizonrl history replay`: retrain a run's steps from a checkpoint and its group log, and compare every digest."""

import json
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from horizonrl.broker.api import Role, Transport
from horizonrl.broker.connect import connected
from horizonrl.broker.groups import Entry, GroupLog
from horizonrl.broker.nats.key_folder import as_role
from horizonrl.broker.nats.server import EmbeddedServer
from horizonrl.broker.signing import TicketSigner
from horizonrl.common.config.schema import RunConfig
from horizonrl.common.config.training import LearnerSection
from horizonrl.common.errors import BrokerUnreachable, CheckpointError, ConfigError
from horizonrl.common.logs import configure_logs
from horizonrl.common.run_dir import CHECKPOINTS, LEDGER, LINEAGES, METRICS, NATS
from horizonrl.common.scratch import scratch
from horizonrl.common.service import run_role
from horizonrl.learner.records.checkpoint import Checkpoint, CheckpointStore
from horizonrl.learner.records.replay import ENTRY_WAIT_S, Replay
from horizonrl.ops.models.models import model_identity, resolve_model
from horizonrl.ops.rundir.directory import check_broker_named, read_config
from horizonrl.ops.rundir.files import Line
from horizonrl.ops.rundir.lines import read_lines
from horizonrl.ops.terminal.console import plain_console

PROBE_S = 2.0
COLUMNS = ("step", "phase", "groups", "tokens", "data", "weights", "loss then", "loss now")
MEASURED = ("loss", "ess", "kl", "clip_share")
"""What a row has of `StepStats`."""
SAME = ("actor.", "broker.ack_wait_s", "broker.max_", "eval.", "model.name", "run.root", "tracker.")
"""Keys that decide no digest begin with these. What they named when a step was trained may be gone."""


@dataclass(frozen=True)
class ReplayRequest:
    """What to replay: the steps after `first`, up to and including `last`."""

    run_dir: Path
    first: int
    last: int | None
    json_file: Path | None
    overrides: Sequence[str]
    changes: Sequence[str] = ()
    """Overrides of another objective; no digest is expected to match then."""


@dataclass(frozen=True)
class Part:
    """Consecutive steps that were trained with one config."""

    config: RunConfig
    ledger: Sequence[Line]
    objective: RunConfig
    """The config with the objective to train by."""


def replay_run(request: ReplayRequest) -> int:
    """Replay and print a line per step. Return 0 if every digest matches the ledger."""
    with scratch() as folder:
        code, rows = retrain(request, folder / "replayed.safetensors")
    if code == 0 and rows:  # only rank 0 has rows
        _report(request, rows)
        return 0 if all(row["equal"] for row in rows) else 1
    return code


def retrain(request: ReplayRequest, frame: Path) -> tuple[int, list[dict[str, Any]]]:
    """Retrain steps, and leave the weights of the last one in `frame`. Return exit code, and what came of each step.

    Where a step needs several ranks, this runs in each of them, and rank 0 alone has rows and weights.
    """
    from horizonrl.learner.engine.registry import require_backend
    from horizonrl.learner.ranks.spawn import spawn_ranks

    config = read_config(request.run_dir, request.overrides)
    check_broker_named(config, request.run_dir, request.overrides)
    # From the model itself in any case: the log may be whole although the run need not keep it.
    first, start = request.first, None
    if first:
        start = start_at(request.run_dir, first, config.learner, "--from")
    lineages = read_lines(request.run_dir / LINEAGES)
    parts = divide(request.run_dir, request.overrides, _ledger(request), lineages, request.changes)
    for part in parts:
        require_backend(part.config.learner)
    # Here, however many machines trained the run: a digest depends on the number of ranks, not on where they are.
    spawn_ranks(_ranks(parts), config.learner.shutdown_s)
    configure_logs(run=config.run.name, role="replay")
    rows: list[dict[str, Any]] = []
    # As a role, so that a stuck rank or a full disk ends with the same codes and messages as in training.
    code = run_role(lambda: _replay(request, parts, start, lineages, rows, frame))
    if code != 0 or not (request.changes or all(row["equal"] for row in rows)):
        for reason in reasons_to_differ(lineages, config):
            print(reason)
    return code, rows


def divide(
    run_dir: Path,
    overrides: Sequence[str],
    ledger: Sequence[Mapping[str, Any]],
    lineages: Sequence[Line],
    changes: Sequence[str] = (),
) -> list[Part]:
    """Divide steps by the config that they were trained with: each start of the learner records what it changed.

    The overrides go on top of each, and on those the changes of its objective.
    """

    def former(line: Line) -> dict[str, Any]:
        values: dict[str, Any] = {}
        # From the last to the first: the value before all of them is the step's.
        for start in sorted(lineages, key=lambda start: -start["lineage"]):
            if start["lineage"] > line["lineage"]:
                values |= {key: before for key, (before, _) in start.get("changed", {}).items()}
        return {key: value for key, value in values.items() if not key.startswith(SAME)}

    parts = []
    for values, lines in groupby(ledger, key=former):
        recorded = [f"--{key}={_argument(value)}" for key, value in values.items()]
        words = [*recorded, *overrides]
        config = read_config(run_dir, words)
        objective = read_config(run_dir, [*words, *changes]) if changes else config
        parts.append(Part(config, list(lines), objective))
    return parts


def _ranks(parts: Sequence[Part]) -> int:
    """Return the number of ranks that trained all parts. Raises ConfigError if it changed."""
    ranks = [part.config.learner.ranks * part.config.learner.nodes for part in parts]
    for number, after in enumerate(ranks):
        if after != ranks[0]:
            step = parts[number].ledger[0]["step"] - 1
            raise ConfigError(
                f"the run was trained on {ranks[0]} ranks up to step {step} and on {after} from there: replay one "
                f"with --to {step}, and the other with --from {step}"
            )
    return ranks[0]


def reasons_to_differ(lineages: Sequence[Mapping[str, Any]], config: RunConfig) -> list[str]:
    """Return what else than a lost group may change a digest: another machine."""
    from horizonrl.learner.loop.recovery import machine

    here = machine(config.learner.threads)
    return [
        f"from step {line['from_step']} on the run was trained on {line['machine']}, and this machine is {here}"
        for line in lineages
        if line.get("machine", here) != here
    ]


def _argument(value: object) -> str:
    return (
        "none"
        if value is None
        else value
        if isinstance(value, str)
        else json.dumps(value, separators=(",", ":"))
    )


async def _replay(
    request: ReplayRequest,
    parts: Sequence[Part],
    start: Checkpoint | None,
    lineages: Sequence[Mapping[str, Any]],
    rows: list[dict[str, Any]],
    frame: Path,
) -> None:
    from horizonrl.learner.engine.thread import EngineThread
    from horizonrl.learner.ranks.launch import on_ranks
    from horizonrl.learner.settings import collecting_rules, engine_settings

    then = {line["step"]: line for line in read_lines(request.run_dir / METRICS)}
    model_dir = resolve_model(parts[0].config.model.name)
    identity = model_identity(model_dir)

    async def lead(part: Part, end_dir: Path | None, engine: EngineThread, vocabulary: int) -> None:
        nonlocal start
        objective = part.objective
        rules = collecting_rules(part.config, vocabulary).of_model(identity)
        trained_by = replace(rules, advantage=objective.advantage, reward=objective.reward)
        async with open_log(request.run_dir, part.config) as (transport, log):
            replay = Replay(
                objective, transport, log, engine, rules, frame, lineages, end_dir, trained_by
            )
            async for done in replay.steps(start, part.ledger):
                row = {
                    "step": done.step,
                    "phase": part.config.phase(done.step - 1)[0].value,
                    "groups_equal": done.groups_equal,
                    "data_equal": done.data_equal,
                    "weights_equal": done.weights_equal,
                    "equal": done.equal,
                    "trained_tokens": done.stats.trained_tokens,
                    "loss_then": then.get(done.step, {}).get("loss"),
                }
                for name in MEASURED:
                    value = getattr(done.stats, name)
                    row[name] = value if math.isfinite(value) else None
                rows.append(row)
        start = replay.end

    with scratch() as folder:
        for number, part in enumerate(parts):
            before = parts[max(number - 1, 0)]
            # A fork has a log of its own.
            if start is not None and part.config.run.name != before.config.run.name:
                start = replace(start, state=with_own_log(start.state))
            end_dir = folder / f"part-{number}" if part is not parts[-1] else None
            settings = engine_settings(part.objective, model_dir)
            await on_ranks(settings, partial(lead, part, end_dir))


@asynccontextmanager
async def open_log(run_dir: Path, config: RunConfig) -> AsyncIterator[tuple[Transport, GroupLog]]:
    """Open a run's log: on the broker of its config if that answers, else on a new one with the run's files."""
    name = config.run.name
    broker = as_role(config.broker, name, Role.LEARNER)
    if name != read_config(run_dir).run.name:  # of the steps before a fork
        run_dir = run_dir.parent / name
    signer = TicketSigner.load(name, broker.ticket_key)
    async with AsyncExitStack() as stack:
        try:
            # The run's broker is usually gone with the run. Nobody should wait for it as long as a role does.
            opening = connected(name, broker, Role.LEARNER, existing=True, wait_s=PROBE_S)
            transport = await stack.enter_async_context(opening)
        # ConfigError: the config of a run with its own broker has no broker.url.
        except (BrokerUnreachable, ConfigError) as error:
            if not has_own_store(run_dir):
                raise type(error)(
                    f"{run_dir} has no nats/jetstream with its log, and no other broker that holds it answers: {error}"
                ) from None
            server = EmbeddedServer(run_dir / NATS, broker.nats.durability)
            await stack.enter_async_context(server)
            section = broker.model_copy(update={"url": server.url})
            opening = connected(name, section, Role.LEARNER, existing=True)
            transport = await stack.enter_async_context(opening)
        yield transport, GroupLog(transport, signer)


def has_own_store(run_dir: Path) -> bool:
    """Return whether a single server has the run's log in its directory. One of a cluster has no more than a part."""
    return (run_dir / NATS / "jetstream").is_dir()


async def read_log(log: GroupLog, first: int, last: int | None = None) -> AsyncIterator[Entry]:
    """Yield what a log holds now, from one sequence to another or to its end."""
    position, end, reader = first - 1, await log.end(), await log.read(after=first - 1)
    end = end if last is None else min(last, end)
    while position < end and (entry := await reader.next(ENTRY_WAIT_S)) is not None:
        position = entry.sequence
        yield entry
    await reader.close()


def possible_starts(run_dir: Path, config: LearnerSection) -> dict[int, Checkpoint | None]:
    """Return the steps from which a run can go on, with their checkpoints; with all of the log, step 0 has none."""
    starts: dict[int, Checkpoint | None] = {0: None} if config.keep_log else {}
    store = CheckpointStore(run_dir / CHECKPOINTS, config.keep_checkpoints)
    return starts | {checkpoint.step: checkpoint for checkpoint in store.all()}


def with_own_log(state: Mapping[str, Any], held: Mapping[int, int] | None = None) -> dict[str, Any]:
    """Return a checkpoint's state for another log, which begins with the groups that it holds for a later step.

    `held` has their ticket numbers by sequence. Without it, their tickets are played again.
    """
    held = held or {}
    waiting = state.get("waiting") and {**state["waiting"], "held": list(held.items())}
    return {**state, "cursor": max(held, default=0), "mark": "", "waiting": waiting or {}}


def start_at(run_dir: Path, step: int, config: LearnerSection, option: str) -> Checkpoint | None:
    """Return the checkpoint of a step that an option names; None for step 0, which starts from the model itself."""
    starts = possible_starts(run_dir, config)
    if step not in starts:
        cure = (
            f"choose {option} among {', '.join(map(str, sorted(starts)))}"
            if starts
            else "train with learner.keep_log = true"
        )
        raise CheckpointError(f"{run_dir} has no checkpoint of step {step}: {cure}")
    return starts[step]


def _ledger(request: ReplayRequest) -> list[dict[str, Any]]:
    lines = read_lines(request.run_dir / LEDGER)
    last = (
        request.last
        if request.last is not None
        else max((line["step"] for line in lines), default=0)
    )
    wanted = [line for line in lines if request.first < line["step"] <= last]
    # Weights follow from the step before: with one step missing, no later digest could match.
    if len(wanted) != max(last - request.first, 1):
        raise ConfigError(
            f"the ledger of {request.run_dir} holds steps 1 to {len(lines)}, so nothing can be replayed from "
            f"{request.first} to {last}"
        )
    return wanted


def _report(request: ReplayRequest, rows: Sequence[Mapping[str, Any]]) -> None:
    table = Table(*COLUMNS, title=f"replay of {request.run_dir.name}", title_justify="left")
    for row in rows:
        table.add_row(
            str(row["step"]),
            row["phase"],
            _word(row["groups_equal"]),
            str(row["trained_tokens"]),
            _word(row["data_equal"]),
            _word(row["weights_equal"]),
            format_number(row["loss_then"]),
            format_number(row["loss"]),
        )
    plain_console().print(table)
    equal = sum(row["equal"] for row in rows)
    print(f"{equal} of {len(rows)} steps match the digests of the ledger")
    if request.json_file is not None:
        report = {"equal": equal == len(rows), "steps": list(rows)}
        request.json_file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def _word(equal: bool) -> Text:
    return Text("equal") if equal else Text("differ", style="red")


def format_number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
