"""`horizonrl history fork` and `revert`: a new run that goes on from a checkpoint of another.

A fork shares the files of that checkpoint by hard links, has a copy of the journal up to it, and a log of its own. The
log begins empty, or with what the other run's log has after the checkpoint. With the same groups a learner on one CPU
rank makes the same versions. A group that is left out has ended as void, so that no step waits for it.
"""

import asyncio
import json
import os
import shlex
import shutil
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from horizonrl.broker.api import Role, Stream, Transport
from horizonrl.broker.connect import connected
from horizonrl.broker.groups import DeadLetter, GroupLog
from horizonrl.broker.nats.key_folder import as_role
from horizonrl.broker.nats.server import EmbeddedServer
from horizonrl.broker.signing import TicketSigner
from horizonrl.broker.tickets import TicketQueue
from horizonrl.common.config.schema import RunConfig
from horizonrl.common.errors import CheckpointError, ConfigError, did_you_mean
from horizonrl.common.files import atomic_write, atomic_write_text
from horizonrl.common.logs import configure_logs
from horizonrl.common.run_dir import CHECKPOINTS, CONFIG, EPISODES, NATS, episode_files
from horizonrl.common.types import Group, Kind, PolicyVersion, Sampling, Task, Ticket, Void
from horizonrl.learner.intake.accounts import TicketAccounts
from horizonrl.learner.records.checkpoint import STATE_FILE, Checkpoint
from horizonrl.learner.records.journal import Journal
from horizonrl.ops.history.lineage import ledger_files
from horizonrl.ops.history.replay import (
    has_own_store,
    open_log,
    possible_starts,
    read_log,
    start_at,
    with_own_log,
)
from horizonrl.ops.rundir.directory import check_broker_named, read_config, to_toml
from horizonrl.ops.rundir.files import JOURNAL, Line

LEASE_S = 30.0
"""Longest wait for a ticket that the broker holds."""
QUERIES = ("actor", "env", "task", "text", "ticket")
"""What a group may be asked for; `text` is what the policy wrote in any turn."""


@dataclass(frozen=True)
class ForkRequest:
    run_dir: Path
    name: str | None
    """Of the new run; by default the old name and the step."""
    overrides: Sequence[str]


@dataclass
class Fork:
    """A run in the making that goes on from a step of another one."""

    source: Path
    before: RunConfig
    """The config of the other run."""
    config: RunConfig
    ledger: Sequence[Line]
    start: Checkpoint | None
    """None begins with the model."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """The query of the groups that are left out; an empty one leaves out none."""
    copied: int = 0
    """Entries in the new log."""
    voided: int = 0

    def write(self, *, with_log: bool) -> None:
        """Make the run directory, whole or not at all. Raises ConfigError if there is one."""
        if self.config.run_dir.exists():
            raise ConfigError(f"{self.config.run_dir} is there already: choose another --name")
        step = 0 if self.start is None else self.start.step
        with atomic_write(self.config.run_dir) as incoming:
            incoming.mkdir(parents=True)
            (incoming / CONFIG).write_text(to_toml(self.config), encoding="utf-8")
            for name in JOURNAL.values():
                if (self.source / name).exists():
                    shutil.copy(self.source / name, incoming)
            Journal(incoming).rewind(step)
            for file in episode_files(self.source, "step", "eval"):
                if int(file.stem.partition("-")[2]) <= step:
                    _share(file, incoming / EPISODES / file.name)
            held = asyncio.run(self._make_streams(incoming, with_log=with_log))
            if self.start is not None:
                directory = incoming / CHECKPOINTS / self.start.path.name
                shutil.copytree(self.start.path, directory, copy_function=_share)
                facts = json.loads((directory / STATE_FILE).read_text(encoding="utf-8"))
                facts["state"] = with_own_log(self.start.state, held)
                # Replaced, and not written over: it is a link to the other run's.
                atomic_write_text(directory / STATE_FILE, json.dumps(facts), durable=True)
        shared = [file.stat() for file in self.config.run_dir.rglob("*") if file.is_file()]
        linked = sum(status.st_size for status in shared if status.st_nlink > 1)
        alone = sum(status.st_size for status in shared) - linked
        print(f"run {self.config.run.name} goes on from step {step} of {self.source}")
        if with_log:
            print(f"its log has {self.copied} entries of that run, {self.voided} of them as void")
        print(f"it shares {linked:,} bytes with that run, and has {alone:,} bytes of its own")
        print(f"train it with: horizonrl train {shlex.quote(str(self.config.run_dir / CONFIG))}")

    async def _make_streams(self, incoming: Path, *, with_log: bool) -> dict[int, int]:
        """Make the broker's part of the run; return the ticket numbers of what it holds for later, by sequence."""
        signer = TicketSigner.load(self.config.run.name, self.config.broker.ticket_key)
        async with _new_broker(self.config, incoming) as (controller, actor):
            tickets, held = list(self._settled()), dict[int, int]()
            if with_log:
                async with open_log(self.source, self.before) as (_, source):
                    copied, held = await self._copy_log(source, GroupLog(actor, signer), signer)
                self.copied, tickets = len(copied), tickets + copied
            queue = TicketQueue(controller, signer)
            issued = {(ticket.kind, ticket.number): ticket for ticket in tickets}
            for kind in Kind:
                await queue.issue_all([issued[key] for key in sorted(issued) if key[0] is kind])
            # In the actors' place: they have ended.
            for _ in issued:
                if (lease := await TicketQueue(actor).lease(LEASE_S)) is not None:
                    await lease.acknowledge()
        return held

    def _settled(self) -> Iterator[Ticket]:
        """Yield the last ticket of each kind that has ended: the controller goes on there, and issues what is open."""
        if self.start is None:
            return
        rollout = self.config.rollout
        accounts = TicketAccounts.restore(self.start.state["accounts"])
        for kind, ranges in accounts.ended_ranges().items():
            if ranges:
                yield Ticket(
                    number=ranges[-1][1],
                    kind=kind,
                    task=Task(env_id=self.config.envs[0].id, task_id="of another run"),
                    group_size=rollout.group_size,
                    horizon_turns=1,
                    sampling=Sampling(
                        temperature=rollout.temperature, max_turn_tokens=rollout.max_turn_tokens
                    ),
                    issued_at_version=PolicyVersion(version=self.start.step),
                )

    async def _copy_log(
        self, source: GroupLog, log: GroupLog, signer: TicketSigner
    ) -> tuple[list[Ticket], dict[int, int]]:
        """Copy what the log has from the checkpoint on; return its tickets, and what is held for later."""
        tickets, held = list[Ticket](), dict[int, int]()
        async for record, is_held in self._entries(source):
            tickets.append(signer.sign(record.ticket))
            if isinstance(record, Group):
                stored = await log.publish(record.model_copy(update={"ticket": tickets[-1]}))
            else:
                stored = await log.publish_void(record.model_copy(update={"ticket": tickets[-1]}))
            if is_held:
                held[stored.sequence] = record.ticket.number
        return tickets, held

    async def _entries(self, source: GroupLog) -> AsyncIterator[tuple[Group | Void, bool]]:
        """Yield the log from the checkpoint on, each entry with whether the checkpoint holds it for a later step."""
        cursor, held = (self.start.cursor, self.start.held) if self.start else (0, [])
        # What ended a ticket before it was issued was passed over.
        refused = {sequence for line in self.ledger for sequence in line["never_issued"]}
        async for entry in read_log(source, min([*held, cursor + 1])):
            record, sequence = entry.record, entry.sequence
            if sequence in refused or isinstance(record, DeadLetter):
                continue
            if sequence > cursor and self.left_out and matches(record, self.left_out):
                record = Void(ticket=record.ticket, reason="reverted", actor="revert")
                self.voided += 1
            if sequence > cursor or sequence in held:
                yield record, sequence in held


def fork(request: ForkRequest, step: int, *, with_log: bool) -> int:
    """Make a run that goes on from the checkpoint of a step, with a recipe of its own from there on."""
    configure_logs(run=request.run_dir.name, role="fork")
    _begin(request, step).write(with_log=with_log)
    return 0


def revert(request: ForkRequest, words: Sequence[str]) -> int:
    """Make a run that goes on from before the first group that a query matches, with the log but for such groups."""
    configure_logs(run=request.run_dir.name, role="revert")
    query = parse_query(words)
    run_dir, before = request.run_dir, read_source(request)
    first = asyncio.run(_find(run_dir, before, query))
    starts = [
        step
        for step, checkpoint in possible_starts(run_dir, before.learner).items()
        if (checkpoint.cursor if checkpoint else 0) < first
    ]
    if not starts:
        raise CheckpointError(
            f"{run_dir} consumed such a group as log entry {first}, and has no checkpoint before it: keep more "
            "(learner.keep_checkpoints), or all of the log (learner.keep_log)"
        )
    reverted = _begin(request, max(starts), "reverted")
    reverted.left_out = query
    reverted.write(with_log=True)
    print(f"what changes: horizonrl history diff {run_dir} {reverted.config.run_dir}")
    return 0


def _begin(request: ForkRequest, step: int, suffix: str | None = None) -> Fork:
    run_dir, before = request.run_dir, read_source(request)
    ledger = ledger_files(run_dir).ledger
    start = start_at(run_dir, step, before.learner, "--at")
    name = request.name or f"{before.run.name}-{suffix or step}"
    keys = [f"--run.name={name}", f"--run.root={run_dir.parent}"]
    servers = len(before.broker.servers)
    # `train` had started its broker, and starts one for the new run. A cluster goes on and serves both.
    if has_own_store(run_dir):
        keys += ["--broker.url=none", "--broker.shared_files=false"]
    elif servers > 1 and before.broker.nats.replicas is None:
        keys += [f"--broker.nats.replicas={servers}"]
    config = read_config(run_dir, [*keys, *request.overrides])
    broker = as_role(config.broker, name, Role.LEARNER)
    return Fork(run_dir, before, config.model_copy(update={"broker": broker}), ledger, start)


def read_source(request: ForkRequest) -> RunConfig:
    """Return the config of the other run, with the broker that is there by now."""
    recorded = read_config(request.run_dir)
    broker = read_config(request.run_dir, request.overrides).broker
    # A ticket key that is set is the new run's, which may have a broker of its own too.
    before = {"ticket_key": recorded.broker.ticket_key, "url": broker.url or recorded.broker.url}
    source = recorded.model_copy(update={"broker": broker.model_copy(update=before)})
    check_broker_named(source, request.run_dir, request.overrides)
    return source


async def _find(run_dir: Path, config: RunConfig, query: Mapping[str, str]) -> int:
    """Return the sequence of the first group in the log that a query matches. Raises ConfigError if there is none."""
    async with open_log(run_dir, config) as (transport, log):
        begin = max(1, (await transport.extent(Stream.GROUPS)).first_sequence)
        if begin > 1:
            print(f"the log begins with entry {begin}: no group before it can be found")
        async for entry in read_log(log, begin):
            if matches(entry.record, query):
                return entry.sequence
    asked = " ".join(f"{key}={pattern}" for key, pattern in query.items())
    raise ConfigError(f"no group in the log of {run_dir} has {asked}")


def matches(group: Group | Void | DeadLetter, query: Mapping[str, str]) -> bool:
    """Return whether an entry is a group that has something like each pattern of a query."""
    if not isinstance(group, Group):
        return False
    values = {
        "actor": [group.provenance.actor],
        "env": [group.ticket.task.env_id],
        "task": [group.ticket.task.task_id],
        "text": [turn.text for episode in group.episodes for turn in episode.turns],
        "ticket": [group.ticket.ticket_id],
    }
    return all(
        any(fnmatchcase(value, pattern) for value in values[key]) for key, pattern in query.items()
    )


def parse_query(words: Sequence[str]) -> dict[str, str]:
    """Read `env=coin text=*hack*`. Raises ConfigError for another key."""
    query = dict(word.partition("=")[::2] for word in words)
    for key in query.keys() - set(QUERIES):
        raise ConfigError(
            f"{key!r} is nothing that a group is asked for{did_you_mean(key, QUERIES)} "
            f"Give KEY=PATTERN, with the keys {', '.join(QUERIES)}"
        )
    return query


@asynccontextmanager
async def _new_broker(config: RunConfig, run_dir: Path) -> AsyncIterator[list[Transport]]:
    """Make the streams of a run, on a broker in its directory unless its config names one.

    The body has them as controller and as actor: a secured broker lets the one issue tickets, and the other end them.
    """
    name, broker = config.run.name, config.broker
    async with AsyncExitStack() as stack:
        if broker.url is None:
            server = EmbeddedServer(run_dir / NATS, broker.nats.durability)
            await stack.enter_async_context(server)
            broker = broker.model_copy(update={"url": server.url})
        yield [
            await stack.enter_async_context(connected(name, as_role(broker, name, role), role))
            for role in (Role.CONTROLLER, Role.ACTOR)
        ]


def _share(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # on another disk
        shutil.copy2(source, target)
