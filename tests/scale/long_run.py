"""What a large step and a long run cost: the learner's bookkeeping, and restarts after millions of tickets.

Nobody plays ten million tickets for a bench. So what such a run leaves behind is made: a ledger, a checkpoint, the
learner's progress and the tickets that are outstanding. The controller and the learner that start on it are the real
ones, on a real server.
"""

import asyncio
import json
import random
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from horizonrl.broker.api import Key, Transport
from horizonrl.broker.connect import connected
from horizonrl.broker.groups import Entry, GroupLog
from horizonrl.broker.nats.server import EmbeddedServer
from horizonrl.broker.open_tickets import OpenTickets
from horizonrl.broker.state import StateStore
from horizonrl.broker.tickets import TicketQueue
from horizonrl.common.config.schema import RunConfig
from horizonrl.common.metrics import Metrics
from horizonrl.common.run_dir import LEDGER, LINEAGES
from horizonrl.common.state import Outcomes, Progress
from horizonrl.common.types import (
    Episode,
    Group,
    Kind,
    Phase,
    PolicyVersion,
    Provenance,
    StopReason,
    Task,
    Ticket,
    Turn,
    VersionSpan,
)
from horizonrl.learner.controller.curriculum import TaskSource
from horizonrl.learner.controller.main import build_controller
from horizonrl.learner.engine.backends.hash import HashEngine
from horizonrl.learner.engine.thread import EngineThread
from horizonrl.learner.intake.collector import Rules
from horizonrl.learner.loop.state import Commit
from horizonrl.learner.main import build_loop, learner_state, open_ports, run_record
from horizonrl.learner.records.checkpoint import CheckpointStore
from horizonrl.learner.records.report import ledger_line

GROUPS_PER_STEP = 1_000
OUTSTANDING = 10_000
EPISODES, TURNS, TOKENS = 4, 5, 16
"""Of a group whose bookkeeping is measured: 320 generated tokens."""
POLL_S = 0.02
AHEAD = 8
"""Entries that the learner fetches at once."""
RULES = Rules(max_staleness=1_000_000, vocabulary=512, max_context_tokens=4_096)


@dataclass(frozen=True, slots=True)
class Restart:
    """The cost of a start after `tickets` tickets, of which the last step's were rolled back."""

    tickets: int
    outstanding: int
    ledger_bytes: int
    learner_s: float
    """Until the learner has announced where the run stands."""
    learner_peak_mib: float
    """Python's memory at its peak, beyond what it was before."""
    controller_s: float
    """Until the controller has issued its first ticket."""
    scan_s: float
    """Until it knows every open ticket. The run goes on meanwhile."""


def bookkeeping_s(groups: int) -> float:
    """Return the learner's CPU time for a step of `groups` groups, without decoding, the engine and the disk.

    The groups come out of order: each was made by another actor.
    """
    config = _config(Path("unused"), groups)
    state, order = learner_state(config, RULES), list(range(groups))
    random.Random(0).shuffle(order)
    entries = [Entry(place, _group(number)) for place, number in enumerate(order, start=1)]
    began = time.process_time()
    for entry in entries:
        assert state.groups_missing
        state.collector.consume(entry, state.position)
        if entry.sequence % AHEAD == 0:
            state.progress()
    assert not state.groups_missing
    pending = state.commit()
    ledger_line(state.policy, state.last_commit.cursor, pending, "data", "weights")
    return time.process_time() - began


async def restart(directory: Path, tickets: int, outstanding: int = OUTSTANDING) -> Restart:
    """Leave a run behind, start its learner and its controller, and time both."""
    config = _config(directory, GROUPS_PER_STEP)
    step = tickets // GROUPS_PER_STEP
    ledger_bytes = await asyncio.to_thread(_leave, config, step)
    async with EmbeddedServer(directory / "nats") as server:
        broker = config.broker.model_copy(update={"url": server.url})
        async with connected(config.run.name, broker) as transport:
            queue = TicketQueue(transport)
            await queue.issue_all([_ticket(tickets + number) for number in range(outstanding)])
            # The log's last entry is the cursor's.
            await GroupLog(transport).publish(_group(tickets - 1))
            await StateStore(transport).put(Key.PROGRESS, _progress(step, step * GROUPS_PER_STEP))
            learner_s, peak_mib = await _start_learner(config, transport)
            controller_s = await _start_controller(config, transport, tickets + outstanding)
            began, still_open = (
                time.perf_counter(),
                OpenTickets(transport, TicketQueue(transport)),
            )
            await still_open.refresh(_progress(step, tickets), {Kind.TRAIN: tickets + outstanding})
            scan_s = time.perf_counter() - began
    return Restart(tickets, outstanding, ledger_bytes, learner_s, peak_mib, controller_s, scan_s)


async def _start_learner(config: RunConfig, transport: Transport) -> tuple[float, float]:
    stopping, tracing = asyncio.Event(), not tracemalloc.is_tracing()
    engine = EngineThread(HashEngine(vocabulary=512), ThreadPoolExecutor(max_workers=1))
    if tracing:
        tracemalloc.start()
    before, began = tracemalloc.get_traced_memory()[0], time.perf_counter()
    ports = open_ports(config, transport, engine, stopping, Metrics())
    loop = build_loop(config, ports, RULES, {"model": "m"})
    async with asyncio.TaskGroup() as group:
        group.create_task(loop.run())
        async for progress in StateStore(transport).watch(Key.PROGRESS):
            if isinstance(progress, Progress) and progress.policy.lineage:
                break
        took_s, peak = time.perf_counter() - began, tracemalloc.get_traced_memory()[1]
        stopping.set()
    if tracing:
        tracemalloc.stop()
    return took_s, (peak - before) / 2**20


async def _start_controller(config: RunConfig, transport: Transport, issued: int) -> float:
    sources = [TaskSource("textcraft", ("a", "b"), 1.0)]
    began = time.perf_counter()
    # A group, so that a controller that fails ends the wait for its answer.
    async with asyncio.TaskGroup() as group:
        controller = group.create_task(build_controller(config, transport, sources).run())
        queue = TicketQueue(transport)
        while (last := await queue.last_issued(Kind.TRAIN)) is None or last.number < issued:
            await asyncio.sleep(POLL_S)
        took_s = time.perf_counter() - began
        controller.cancel()
    return took_s


def _leave(config: RunConfig, step: int) -> int:
    """Write the run directory of a learner that was killed in the step after `step`; return the ledger's size."""
    config.run_dir.mkdir(parents=True)
    (config.run_dir / LINEAGES).write_text(
        json.dumps({"lineage": 0, "from_step": 0, "time": 0.0}) + "\n", encoding="utf-8"
    )
    with (config.run_dir / LEDGER).open("w", encoding="utf-8") as ledger:
        for number in range(1, step + 2):
            first = (number - 1) * GROUPS_PER_STEP
            names = [f"train-{ticket:08d}" for ticket in range(first, first + GROUPS_PER_STEP)]
            line = {
                "step": number,
                "trained": [[first + place, name] for place, name in enumerate(names, start=1)],
                "actors": dict.fromkeys(names, "actor-0"),
            }
            ledger.write(json.dumps(line) + "\n")
        ledger.write('{"step": ')  # the crash came in the middle of a line
        size = ledger.tell()
    last = [[0, step * GROUPS_PER_STEP - 1]]
    accounts = learner_state(config, RULES).collector.accounts.dump()
    accounts[Kind.TRAIN.value] |= {"trained": step * GROUPS_PER_STEP, "ended": last}
    record = run_record(config, {"model": "m"}, ())
    state = asdict(Commit(step=step, cursor=1, accounts=accounts)) | {
        "lineage": 0,
        "identity": dict(record.identity),
        "config": dict(record.config),
    }
    engine = HashEngine(vocabulary=512)
    CheckpointStore(config.run_dir / "checkpoints", keep=1).write(
        step, lambda place: engine.save(place, state), state
    )
    return size


def _config(directory: Path, groups_per_step: int) -> RunConfig:
    return RunConfig.load(
        [],
        [
            "--run.name=long",
            f"--run.root={directory}",
            "--imitation.steps=0",
            "--rl.steps=100000000",
            f"--rl.groups_per_step={groups_per_step}",
            "--rl.max_staleness=20",
            "--horizon.horizons=[4]",
            "--rollout.group_size=4",
        ],
    )


def _progress(step: int, settled: int) -> Progress:
    return Progress(
        step=step,
        phase=Phase.RL,
        phase_step=step,
        policy=PolicyVersion(version=step),
        cursor=1,
        outcomes={Kind.TRAIN: Outcomes(trained=settled)},
        lowest_unsettled={Kind.TRAIN: settled},
    )


def _ticket(number: int) -> Ticket:
    task = Task(env_id="textcraft", task_id="a")
    return Ticket(
        number=number, kind=Kind.TRAIN, task=task, group_size=EPISODES, horizon_turns=TURNS
    )


def _group(number: int) -> Group:
    episodes = tuple(
        Episode(
            index=index,
            prompt_ids=tuple(range(TOKENS)),
            turns=tuple(
                Turn(
                    output_ids=tuple(range(TOKENS)),
                    logprobs=(-1.0,) * TOKENS,
                    spans=(VersionSpan(version=0, lineage=0, tokens=TOKENS),),
                    observation_ids=tuple(range(TOKENS)) if turn + 1 < TURNS else (),
                    reward=float(index % 2),
                )
                for turn in range(TURNS)
            ),
            stop=StopReason.TERMINATED,
        )
        for index in range(EPISODES)
    )
    return Group(ticket=_ticket(number), episodes=episodes, provenance=Provenance(actor="bench"))
