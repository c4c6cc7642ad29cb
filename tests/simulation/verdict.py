"""What must be true of a simulated run when it is over: judged by what it left behind, not by what it said."""

import re
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

from horizonrl.broker.api import Key, Stream
from horizonrl.broker.groups import DeadLetter, GroupLog
from horizonrl.broker.memory import MemoryTransport
from horizonrl.broker.state import StateStore
from horizonrl.common.metrics import PREFIX
from horizonrl.common.state import Progress, WeightsManifest
from horizonrl.common.types import TRAINED, DropReason, Group, Kind
from horizonrl.learner.engine.backends.hash import HashEngine
from horizonrl.learner.engine.thread import EngineThread
from horizonrl.learner.records.replay import Replay
from horizonrl.learner.settings import collecting_rules
from horizonrl.ops.history.verify import Evidence, gather, judge
from horizonrl.ops.rundir.files import Files
from tests.simulation.broker import QuietServer
from tests.simulation.history import History
from tests.simulation.model import check_history
from tests.simulation.roles import IDENTITY, VOCABULARY, Roles, Sampled

UNUSUAL = ("tickets_reissued", "leases_repeated", "tickets_given_back")
"""Counters of what happens where something goes wrong."""


@dataclass
class Counts:
    """What a run came to."""

    steps: int = 0
    lineages: int = 0
    tickets: int = 0
    repeats: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    durations: list[tuple[float, bool]] = field(default_factory=list)
    """By train ticket with a usable group, how long a turn of its task takes, and whether it was trained."""


async def judge_run(roles: Roles, history: History, restored: bool) -> tuple[list[str], Counts]:
    """Return what is wrong with a run, and what it came to. `restored`: the broker's store went back in time."""
    config = roles.config
    files = Files.read(config.run_dir)
    ledger, lineages = files.ledger, files.lineages
    transport = archived(roles)
    evidence = await gather(config, files, transport)
    verdict = judge(evidence)
    findings = verdict.findings
    if restored:  # what the log has lost after it was read for the last time, nobody notices
        findings = [text for text in findings if not re.match(r"ledger: |doubled: \d", text)]
    findings += check_history(history.events, config, restored)
    findings += list(unfounded(evidence, roles.sampled))
    if len(ledger) != config.total_steps:
        findings.append(f"the ledger has {len(ledger)} of {config.total_steps} steps")
    measured = [line["step"] for line in files.metrics]
    if measured != [line["step"] for line in ledger]:
        findings.append(f"metrics of the steps {measured}")
    # Actors publish neither, and the rules of a run do not change.
    for reason in ("too_few_valid", "malformed", "temperature"):
        if verdict.dropped.get(reason):
            findings.append(f"groups were dropped as {reason}, and none was")
    for line in ledger:
        if line["trained"] != sorted(line["trained"]):
            findings.append(f"step {line['step']} was trained in another order than the log's")
    numbers = [line["lineage"] for line in lineages]
    if numbers != sorted(set(numbers)):
        findings.append(f"lineages {numbers}: each start has its own")
    findings += [text async for text in left_open(roles, files, restored)]
    findings += [text async for text in unlike_replay(roles, transport, evidence)]
    if roles.metrics.value("conservation_violations") and not restored:
        findings.append("the controller saw more tickets end than were issued")
    if roles.tasks.most_playing > max(roles.profile.slots, 2):
        findings.append(f"{roles.tasks.most_playing} episodes in {roles.profile.slots} slots")
    if roles.profile.calm:
        findings += list(not_calm(roles, evidence, verdict.repeats))
    if config.rl.stale == "wait" and not restored:
        findings += list(not_lowest(evidence))
    # An actor that has waited for its weights in vain begins with older ones. So does one that plays a ticket of a
    # future that the learner's restart has rolled back.
    if config.rl.stale == "wait" and len(lineages) == 1 and not history.late:
        findings += list(stale_ends(evidence))
    counts = Counts(
        steps=verdict.steps,
        lineages=len(lineages),
        tickets=sum(verdict.issued.values()),
        repeats=verdict.repeats,
        dropped=Counter(verdict.dropped),
        durations=list(durations(roles, evidence)),
    )
    return findings, counts


def archived(roles: Roles) -> MemoryTransport:
    """Return a broker that holds the whole group log, whatever has been freed."""
    server, broker = QuietServer(), roles.broker
    run, held = server.runs["run"], broker.run.streams
    run.streams.update(held)
    log = run.streams[Stream.GROUPS] = type(held[Stream.GROUPS])()
    log.messages = dict(sorted(broker.archive.items()))
    log.last_sequence = held[Stream.GROUPS].last_sequence
    return MemoryTransport(server, "run")


async def left_open(roles: Roles, files: Files, restored: bool) -> AsyncIterator[str]:
    """The last words of the run: everyone was told of its end, and nothing was refused."""
    state = StateStore(MemoryTransport(roles.broker.server, "run"))
    progress, policy = [await state.get(key) for key in (Key.PROGRESS, Key.POLICY)]
    total = roles.config.total_steps
    if not isinstance(progress, Progress) or progress.finished_step != total:
        yield f"the key progress says {progress}"
    if not isinstance(policy, WeightsManifest) or policy.finished_step != total:
        yield f"the key policy says {policy}"
    elif policy.policy.version != total:
        yield f"the last weights are {policy.policy}"
    rounds = [len(line["ends"]) for line in files.evals]
    # After a store has gone back, the last round may be issued once more.
    missing = len(rounds) < roles.config.eval_rounds
    more = len(rounds) > roles.config.eval_rounds and not restored
    if missing or more or set(rounds) - {len(roles.eval_tasks)}:
        yield f"{len(rounds)} of {roles.config.eval_rounds} evaluations, of {rounds} tickets"
    dead = len(roles.broker.run.streams[Stream.DEAD].messages)
    if dead and not restored:
        yield f"{dead} messages were refused as no records"


async def unlike_replay(
    roles: Roles, transport: MemoryTransport, evidence: Evidence
) -> AsyncIterator[str]:
    """A crash-free training run on the same log has the same digests, in every step that can be compared."""
    if evidence.cuts:
        return
    config = roles.config
    rules = collecting_rules(config, VOCABULARY).of_model(IDENTITY)
    engine = EngineThread(HashEngine(), object())  # type: ignore[arg-type]
    replay = Replay(
        config, transport, GroupLog(transport), engine, rules, roles.directory / "frame"
    )
    try:
        async for step in replay.steps(None, evidence.ledger):
            if not step.equal:
                yield f"step {step.step} is another one without crashes: {step}"
                return
    except Exception as error:  # noqa: BLE001 - whatever it is, the run cannot be trained again
        yield f"replay: {type(error).__name__}: {error}"


def unfounded(evidence: Evidence, sampled: set[Sampled]) -> Iterator[str]:
    """Yield the turns whose ids no policy sampled after what the episode says that it read."""
    for entry in evidence.log.values():
        if isinstance(entry.record, DeadLetter) or not isinstance(entry.record, Group):
            continue
        group = entry.record
        if group.ticket.kind is Kind.DEMO:
            continue
        for episode in group.episodes:
            read = list(episode.prompt_ids)
            for turn in episode.turns:
                output = tuple(turn.output_ids)
                if (tuple(read), output, tuple(turn.spans)) not in sampled:
                    yield f"{group.ticket.ticket_id} has ids {output} after {read}, which nobody sampled"
                read += [*output, *turn.observation_ids]


def not_calm(roles: Roles, evidence: Evidence, repeats: int) -> Iterator[str]:
    """Yield what may only happen where something went wrong, and nothing did."""
    if repeats:
        yield f"{repeats} groups came twice in a calm run"
    # A run that is over gives back the demonstrations that no step has waited for.
    spare = roles.config.rl.demos_per_step > 0
    for metric in roles.metrics.registry.collect():
        total = sum(sample.value for sample in metric.samples if sample.name.endswith("_total"))
        if total and not spare and metric.name.removeprefix(PREFIX) in UNUSUAL:
            yield f"{metric.name} is {total:g} in a calm run"
    for entry in evidence.log.values():
        if isinstance(entry.record, Group) and entry.record.ticket.kind is Kind.TRAIN:
            issued, oldest = (
                entry.record.ticket.issued_at_version.version,
                entry.record.oldest_version,
            )
            if oldest < issued and roles.config.rl.publish_every == 1:
                yield f"{entry.record.ticket.ticket_id} of version {issued} began with {oldest}"


def not_lowest(evidence: Evidence) -> Iterator[str]:
    """Yield the steps of a run that waits which did not take the lowest tickets of those that had come."""
    wanted, settled = evidence.config.rl.groups_per_step, set[str]()
    refused = {end.ticket for end in evidence.files.ends() if end.how != TRAINED}
    for line in evidence.ledger:
        come = {
            entry.record.ticket.ticket_id
            for sequence, entry in evidence.log.items()
            if sequence <= line["cursor"] and isinstance(entry.record, Group)
        }
        trained = {ticket for _, ticket in line["trained"] if ticket.startswith("train")}
        due = sorted(t for t in come - refused - settled if t.startswith("train"))[:wanted]
        if trained and trained != set(due):
            yield f"step {line['step']} trained {sorted(trained)}, and {due} had come"
        settled |= trained


def stale_ends(evidence: Evidence) -> Iterator[str]:
    for end in evidence.files.ends():
        if end.how == DropReason.STALE and isinstance(
            group := evidence.log[end.sequence].record, Group
        ):
            issued = group.ticket.issued_at_version
            yield (
                f"a run that waits dropped {end.ticket} of {issued}, begun with {group.oldest_version}, as "
                f"stale in step {end.step}"
            )


def durations(roles: Roles, evidence: Evidence) -> Iterator[tuple[float, bool]]:
    """Yield, by train ticket whose group could have been trained, its task's duration and whether it was trained."""
    for end in evidence.files.ends():
        entry = evidence.log.get(end.sequence)
        if entry is None or not isinstance(entry.record, Group):
            continue
        if entry.record.ticket.kind is Kind.TRAIN and end.how != DropReason.ZERO_VARIANCE:
            yield roles.tasks.duration_s(entry.record.ticket.task.task_id), end.how == TRAINED
