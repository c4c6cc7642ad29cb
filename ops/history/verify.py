"""`horizonrl history verify`: does every ticket of a run have exactly one end, and did training keep its bounds?

It checks three invariants of docs/invariants.md: "Conservation", "Bounded staleness" and "Exactly once". The evidence
is the ledger, the evaluations, the group log and the ticket stream; no counter that a role kept is trusted. The log
must be complete (`learner.keep_log`).

If the broker's store went back, `lineages.jsonl` says from which step on the log was read again. What was trained up to
that step from entries that the log no longer holds cannot be compared with it; its tickets still end exactly once.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from horizonrl.broker.api import Stream, Transport
from horizonrl.broker.groups import DeadLetter, Entry, GroupLog
from horizonrl.broker.signing import TicketSigner
from horizonrl.broker.tickets import TicketQueue
from horizonrl.common.config.schema import RunConfig
from horizonrl.common.errors import ConfigError
from horizonrl.common.logs import configure_logs
from horizonrl.common.types import TRAINED, DropReason, Group, Kind
from horizonrl.learner.controller.horizon import Histories, adaptive_rules, scheduled_turns
from horizonrl.ops.history.lineage import ledger_files
from horizonrl.ops.history.replay import open_log, read_log
from horizonrl.ops.rundir.directory import check_broker_named, read_config
from horizonrl.ops.rundir.files import Files, Line, TicketEnd
from horizonrl.ops.rundir.view import RunView

EVALUATED, VOID = "evaluated", "void"
FIXED = ("horizon.", "imitation.steps", "rl.max_staleness", "run.name", "run.seed")
"""Keys that begin with these decide what is right, so a run that changed one is judged by no single config."""


@dataclass(frozen=True, slots=True)
class Evidence:
    config: RunConfig
    files: Files
    log: Mapping[int, Entry]
    """The entries of the group log by sequence."""
    issued: Mapping[Kind, int]

    @property
    def ledger(self) -> Sequence[Line]:
        return self.files.ledger

    @property
    def cuts(self) -> list[Line]:
        """The lines of `lineages.jsonl` of learners that found the log cut, in order."""
        return [line for line in self.files.lineages if "log_cut" in line]

    def is_cut(self, end: TicketEnd) -> bool:
        """Return whether the broker has lost the entry of an end, before a learner resumed behind it."""
        behind = any(
            end.step <= cut["from_step"] and end.sequence > cut["log_cut"]["read_on_after"]
            for cut in self.cuts
        )
        return behind and not self.holds(end)

    def holds(self, end: TicketEnd) -> bool:
        entry = self.log.get(end.sequence)
        return entry is not None and ended_ticket(entry) == end.ticket

    def comparable(self) -> list[tuple[int, int]]:
        """Return the spans of steps (after, to) whose entries the log holds; all of them if it was never cut."""
        cut_steps = sorted({end.step for end in self.files.ends() if self.is_cut(end)})
        spans, first = [], 0
        for resumed in sorted(cut["from_step"] for cut in self.cuts):
            if lost := [step for step in cut_steps if first < step <= resumed]:
                spans.append((first, lost[0] - 1))
                first = resumed
        return [(after, to) for after, to in [*spans, (first, len(self.ledger))] if after < to]

    def is_spare(self, kind: Kind) -> bool:
        """Return whether tickets of a kind may be open at the end: no step of RL waits for its demonstrations."""
        return kind is Kind.DEMO and self.config.rl.demos_per_step > 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """The counts of the run, and one sentence per violation."""

    issued: dict[str, int]
    trained: int
    evaluated: int
    dropped: dict[str, int]
    void: int
    repeats: int
    steps: int
    lineages: int
    lost: list[str]
    """Tickets that have no end."""
    doubled: list[str]
    """Tickets that have two ends, and groups that were trained twice."""
    staleness_violations: list[str]
    horizon_violations: list[str]
    ledger_violations: list[str]
    """Contradictions within the ledger, or between the ledger and the log."""

    @property
    def findings(self) -> list[str]:
        return [
            *(f"lost: {text}" for text in self.lost),
            *(f"doubled: {text}" for text in self.doubled),
            *(f"staleness: {text}" for text in self.staleness_violations),
            *(f"horizon: {text}" for text in self.horizon_violations),
            *(f"ledger: {text}" for text in self.ledger_violations),
        ]


def verify(run_dir: Path, overrides: Sequence[str]) -> int:
    """Print the verdict on a finished run; return 1 if something is wrong with it, else 0."""
    configure_logs(run=run_dir.name, role="verify")
    config, files = read_config(run_dir, overrides), ledger_files(run_dir)
    check_broker_named(config, run_dir, overrides)
    if not RunView.read(run_dir, config, files).finished:
        raise ConfigError(f"{run_dir} is not finished: its open tickets have no end yet")
    for start in files.lineages:
        for key in start.get("changed", {}):
            if key.startswith(FIXED):
                raise ConfigError(
                    f"{run_dir} changed {key} at step {start['from_step']}, and a run is judged by one config: "
                    "verify one that kept it, such as the run that a fork began with"
                )

    async def evidence() -> Evidence:
        async with open_log(run_dir, config) as (transport, _):
            first = (await transport.extent(Stream.GROUPS)).first_sequence
            if first > 1:
                raise ConfigError(
                    f"the log of {run_dir} begins with entry {first}, and the verdict needs all of it: train with "
                    "learner.keep_log = true"
                )
            return await gather(config, files, transport)

    verdict = judge(asyncio.run(evidence()))
    issued = sum(verdict.issued.values())
    dropped = sum(verdict.dropped.values())
    print(
        f"{issued} tickets issued = {verdict.trained} trained + {verdict.evaluated} evaluated + {dropped} dropped + "
        f"{verdict.void} void, in {verdict.steps} steps of {verdict.lineages} lineages"
    )
    print("\n".join(verdict.findings) or "nothing lost, doubled or too stale; ledger and log agree")
    return int(bool(verdict.findings))


async def gather(config: RunConfig, files: Files, transport: Transport) -> Evidence:
    """Read the whole group log and the ticket stream."""
    signer = TicketSigner.load(transport.run, config.broker.ticket_key)
    entries = {entry.sequence: entry async for entry in read_log(GroupLog(transport, signer), 1)}
    issued = dict.fromkeys(Kind, 0)
    # The last ticket issued is never removed.
    for _, ticket in await TicketQueue(transport).stored_tickets():
        issued[ticket.kind] = max(issued[ticket.kind], ticket.number + 1)
    return Evidence(config, files, entries, issued)


def judge(evidence: Evidence) -> Verdict:
    ends = list(evidence.files.ends())
    how = Counter(end.how for end in ends)
    trained, evaluated, void = (how.pop(end, 0) for end in (TRAINED, EVALUATED, VOID))
    return Verdict(
        issued={kind.value: count for kind, count in evidence.issued.items() if count},
        trained=trained,
        evaluated=evaluated,
        dropped=dict(how),
        void=void,
        repeats=sum(line["repeats"] for line in evidence.ledger),
        steps=len(evidence.ledger),
        lineages=1 + max((line["lineage"] for line in evidence.ledger), default=0),
        lost=list(_lost(evidence, ends)),
        doubled=list(_doubled(evidence, ends)),
        staleness_violations=list(_stale(evidence, ends)),
        horizon_violations=list(_horizons(evidence, ends)),
        ledger_violations=[*_ledger(evidence), *_held_out(ends), *_against_log(evidence, ends)],
    )


def parse_id(ticket_id: str) -> tuple[Kind, int]:
    """Return the kind and the number in a ticket id."""
    kind, _, number = ticket_id.partition("-")
    return Kind(kind), int(number)


def _lost(evidence: Evidence, ends: Sequence[TicketEnd]) -> Iterator[str]:
    ended = {parse_id(end.ticket) for end in ends}
    for kind, count in evidence.issued.items():
        for number in range(count):
            if (kind, number) not in ended and not evidence.is_spare(kind):
                yield f"{kind.value}-{number:08d} was issued and has no end"


def _doubled(evidence: Evidence, ends: Sequence[TicketEnd]) -> Iterator[str]:
    by_ticket: dict[str, list[TicketEnd]] = defaultdict(list)
    by_sequence: dict[int, list[TicketEnd]] = defaultdict(list)
    for end in ends:
        by_ticket[end.ticket].append(end)
        if not evidence.is_cut(end):  # its sequence is another entry's by now
            by_sequence[end.sequence].append(end)
    for name, group in [*by_ticket.items(), *by_sequence.items()]:
        if len(group) > 1:
            story = ", ".join(
                f"{end.how} in step {end.step} (sequence {end.sequence})" for end in group
            )
            yield f"{name} ended {len(group)} times: {story}"


def _stale(evidence: Evidence, ends: Sequence[TicketEnd]) -> Iterator[str]:
    bound = evidence.config.rl.max_staleness
    for end, group in _train_groups(evidence, ends):
        # Step N trains version N - 1, and staleness counts from there (invariants: Bounded staleness).
        if end.how == TRAINED and (age := end.step - 1 - group.oldest_version) > bound:
            yield f"{end.ticket} of version {group.oldest_version} was trained in step {end.step}: {age} > {bound}"


def _horizons(evidence: Evidence, ends: Sequence[TicketEnd]) -> Iterator[str]:
    """Each ticket carries the horizon that was due when it was issued, and horizons never shrink.

    An adaptive horizon may be that of a later step: the learner may have reached that step before it was rolled back.
    What decided on it is unknown if the broker has lost a part of the log.
    """
    config, before = evidence.config, Counter[str]()
    schedule, adaptive = config.horizon, _adaptive_turns(evidence)
    # In the order of issue, which is that of the schedule. Actors end tickets in any order.
    for end, group in sorted(_train_groups(evidence, ends), key=lambda pair: pair[1].ticket.number):
        ticket, env_id = group.ticket, group.ticket.task.env_id
        step = ticket.issued_at_version.version - config.imitation.steps
        if schedule.kind != "adaptive":
            due = [scheduled_turns(config, config.run.seed, env_id, step, ticket.number)]
        else:
            due = list(config.horizons(env_id)) if evidence.cuts else adaptive[env_id][step:]
        if ticket.horizon_turns not in due:
            yield f"{end.ticket} has {ticket.horizon_turns} turns, but was issued at RL step {step}: {due[0]} turns"
        if ticket.horizon_turns < before[env_id] and schedule.kind not in ("shuffled", "reversed"):
            yield f"{end.ticket} has {ticket.horizon_turns} turns after a ticket of {before[env_id]}"
        # The stage of a version that was rolled back comes again.
        if end.how != DropReason.LINEAGE:
            before[env_id] = max(before[env_id], ticket.horizon_turns)


def _adaptive_turns(evidence: Evidence) -> dict[str, list[int]]:
    """Recompute each environment's adaptive horizon before the first RL step and after each step."""
    rules, first = adaptive_rules(evidence.config), evidence.config.imitation.steps
    histories = Histories(rules)
    turns = {env_id: [histories.turns(env_id)] for env_id in rules}
    for line in evidence.ledger[first:]:
        entries = (
            evidence.log.get(sequence) for sequence, *_ in [*line["trained"], *line["dropped"]]
        )
        groups = [
            entry.record
            for entry in entries
            if entry is not None and isinstance(entry.record, Group)
        ]
        histories.observe(groups, line["step"] - first)
        for env_id in rules:
            turns[env_id].append(histories.turns(env_id))
    return turns


def _train_groups(
    evidence: Evidence, ends: Sequence[TicketEnd]
) -> Iterator[tuple[TicketEnd, Group]]:
    for end in ends:
        entry = evidence.log.get(end.sequence)
        if evidence.is_cut(end):
            continue
        if (
            entry is not None
            and isinstance(entry.record, Group)
            and entry.record.ticket.kind is Kind.TRAIN
        ):
            yield end, entry.record


def _ledger(evidence: Evidence) -> Iterator[str]:
    """The ledger is consistent: it has one line per step, and versions, lineages and cursors never decrease."""
    before: Line = {"step": 0, "lineage": 0, "cursor": 0}
    for line in evidence.ledger:
        if line["step"] != before["step"] + 1 or line["version"] != line["step"]:
            yield f"step {line['step']} with version {line['version']} follows step {before['step']}"
        cut = any(
            before["lineage"] < start["lineage"] <= line["lineage"] for start in evidence.cuts
        )
        if line["lineage"] < before["lineage"] or (line["cursor"] < before["cursor"] and not cut):
            yield f"step {line['step']} goes back behind lineage {before['lineage']}, cursor {before['cursor']}"
        before = line


def _held_out(ends: Sequence[TicketEnd]) -> Iterator[str]:
    """Eval tickets are never trained on, and only eval tickets are evaluated."""
    for end in ends:
        evaluation = parse_id(end.ticket)[0] is Kind.EVAL
        if end.how == TRAINED if evaluation else end.how == EVALUATED:
            yield f"step {end.step} ends {end.ticket} as {end.how}"


def _against_log(evidence: Evidence, ends: Sequence[TicketEnd]) -> Iterator[str]:
    """Every end points to an entry of the log with the same ticket, and every entry is an end or a repeat of one."""
    ended_at: dict[str, int] = {}
    for end in ends:
        ended_at.setdefault(end.ticket, end.sequence)
        entry = evidence.log.get(end.sequence)
        if not evidence.holds(end) and not evidence.is_cut(end):
            held = "nothing" if entry is None else str(ended_ticket(entry))
            yield f"step {end.step} ends {end.ticket} by sequence {end.sequence}, where the log holds {held}"
        if parse_id(end.ticket)[1] >= evidence.issued[parse_id(end.ticket)[0]]:
            yield f"step {end.step} ends {end.ticket}, which was never issued"
    cursor = evidence.ledger[-1]["cursor"] if evidence.ledger else 0
    sequences = {end.sequence for end in ends if not evidence.is_cut(end)}
    # What would have ended a ticket before it was issued was passed over.
    sequences |= {sequence for line in evidence.ledger for sequence in line.get("never_issued", ())}
    repeats = 0
    for sequence, entry in evidence.log.items():
        ticket_id = str(ended_ticket(entry))
        if sequence in sequences or (sequence > cursor and _is_spare(evidence, entry)):
            continue
        # A repeat comes after the entry that ended its ticket. An earlier one was skipped (invariants: Order decides).
        # A ticket whose end was lost may have ended at any sequence.
        if (
            ticket_id not in ended_at
            if evidence.cuts
            else ended_at.get(ticket_id, sequence) >= sequence
        ):
            yield f"sequence {sequence} ({ended_ticket(entry)}) is neither an end nor the repeat of one"
        # Beyond the cursor no step has counted yet.
        repeats += sequence <= cursor and not isinstance(entry.record, DeadLetter)
    # Repeats that were counted may be lost, and entries that are read again are not counted.
    if (
        counted := sum(line["repeats"] for line in evidence.ledger)
    ) != repeats and not evidence.cuts:
        yield f"the ledger counts {counted} repeats up to sequence {cursor}, the log holds {repeats}"


def _is_spare(evidence: Evidence, entry: Entry) -> bool:
    """Return whether an entry ends a ticket that may be open at the end."""
    return entry.ends is not None and evidence.is_spare(entry.ends[0])


def ended_ticket(entry: Entry) -> str | None:
    """Return the id of the ticket that an entry ends."""
    return (
        entry.record.ticket_id
        if isinstance(entry.record, DeadLetter)
        else entry.record.ticket.ticket_id
    )
