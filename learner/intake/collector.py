"""The collector: settles the entries of the group log, in order, and gathers the groups of one optimizer step.

Place in the flow: Group → **Batch**. Pure logic over records: no broker, no torch, no clock. Every decision depends on
the log's order and on the learner's version alone, so a resumed learner makes the same decisions again
(docs/invariants.md: order decides).

An entry is admitted, dropped with a reason, recorded as void, or recognised as a repeat. An admitted group is settled
when its step is committed; until then its ticket is outstanding. With `rl.stale = "wait"` a train group is held until
its step (`waiting.py`), and its ticket is outstanding meanwhile. An eval ticket is settled at once and its end is
returned: eval groups are never trained on.
"""

from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import itemgetter
from typing import TypeVar

from horizonrl.broker.codec import PACKED
from horizonrl.broker.groups import DeadLetter, Entry
from horizonrl.common.config.objective import (
    AdvantageSection,
    EnvironmentReward,
    GrpoAdvantage,
    RewardSection,
)
from horizonrl.common.types import (
    MAX_SPANS,
    TRAINED,
    DropReason,
    Group,
    Kind,
    Phase,
    PolicyVersion,
    Provenance,
    Record,
    Ticket,
    Void,
)
from horizonrl.learner.algorithm.advantage import has_signal
from horizonrl.learner.algorithm.batch import Batch, sampled_by, traces_of
from horizonrl.learner.algorithm.reward import STD_FLOOR, batch_rewards, shaped
from horizonrl.learner.intake.accounts import TicketAccounts, TicketNumbers
from horizonrl.learner.intake.waiting import Waiting

R = TypeVar("R", bound=Record)

LARGE_TOKENS = 10_000
"""Generated tokens above which a group that is held is compacted: below it, half a millisecond counts for more."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What a group must satisfy to be trained on."""

    max_staleness: int
    vocabulary: int
    """Number of token ids. This model cannot have sampled an id at or above it."""
    max_context_tokens: int
    advantage: AdvantageSection = field(default_factory=GrpoAdvantage)
    reward: RewardSection = field(default_factory=EnvironmentReward)
    demos_in_rl: bool = False
    """Demonstrations are trained together with the groups of RL."""
    temperature: float | None = None
    """At which the learner scores: a ratio to logprobs of another temperature means nothing. None: not checked."""
    model_digest: str = ""
    """Digest of the model in training: token ids mean something else to another model. Empty: not checked."""
    template_digest: str = ""
    """Digest of its chat template. Empty: not checked."""
    stop_ids: str = ""
    """The ids with which its own settings end a reply. Empty: not checked."""

    def of_model(self, identity: Mapping[str, str]) -> "Rules":
        """Return these rules for groups of one model alone, whose digests `identity` has."""
        return replace(
            self,
            model_digest=identity["model"],
            template_digest=identity["template"],
            stop_ids=identity.get("stops", ""),  # an older record has none
        )

    def has_signal(self, group: Group) -> bool:
        """Return whether the episodes of a group differ in what they are trained for."""
        # What is masked has no loss. A batch of nothing else would move the weights by the optimizer's momentum alone.
        if self.advantage.truncated == "mask" and all(
            episode.stop.truncated for episode in group.valid_episodes
        ):
            return False
        # As they are trained: with a cost, episodes of equal rewards and unequal length differ.
        return has_signal(
            [shaped(episode, self.reward) for episode in group.valid_episodes], self.advantage
        )

    def differs(self, group: Group) -> bool:
        """Return whether the whole returns of a group differ, whatever its estimator compares them with.

        An estimator with a critic trains a group whose episodes all succeed too, and learns most from one that differs.
        As the environment rewarded them: by the cost of turns, a task that is always solved would differ each time, and
        an adaptive curriculum would prefer it to those that are not.
        """
        returns = [episode.episode_return for episode in group.valid_episodes]
        return max(returns, default=0.0) - min(returns, default=0.0) > STD_FLOOR

    def same_model(self, made: Provenance) -> bool:
        """Return whether a group was sampled with the run's model and template; a missing digest passes."""
        pairs = (
            (self.model_digest, made.model_digest),
            (self.template_digest, made.template_digest),
            (self.stop_ids, made.stop_ids),
        )
        # An actor without the model's files sends none (PROTOCOL.md): that is no sign of another model.
        return all(not mine or not named or named == mine for mine, named in pairs)


@dataclass(frozen=True, slots=True)
class LearnerPosition:
    """Where the learner is: the version that it trains now, the phase of that step, and the groups that it takes."""

    version: int
    phase: Phase
    wanted: int = 0
    """Groups of the phase's kind that make the step. Only a collector that waits asks for them."""


@dataclass(frozen=True, slots=True)
class Drop:
    sequence: int
    ticket_id: str
    reason: DropReason


@dataclass(frozen=True, slots=True)
class EvalEnd:
    """How an eval ticket ended."""

    sequence: int
    number: int
    how: str
    """`evaluated`, `void`, or the reason of a drop."""
    ticket: Ticket | None = None
    """None for an undecodable message."""
    group: Group | None = None
    """The evaluated group."""


@dataclass
class PendingBatch:
    """What has been consumed for the next step."""

    admitted: list[tuple[int, Group]] = field(default_factory=list)
    """(sequence, group) in log order."""
    consumed: list[Group] = field(default_factory=list)
    """Every well-formed group, including the dropped ones. The step's reward and success are measured on them, and an
    adaptive horizon is decided by them. Dropped groups are `compacted`."""
    dropped: list[Drop] = field(default_factory=list)
    voids: list[tuple[int, str]] = field(default_factory=list)
    """(sequence, ticket id) in log order."""
    repeats: int = 0
    holes: list[tuple[int, int]] = field(default_factory=list)
    """First and last sequences of what the broker has lost on the way."""
    unissued: list[int] = field(default_factory=list)
    """Sequences of the entries that would have ended a ticket before it was issued. The ledger holds them for replay,
    because the log alone does not show when a ticket was issued."""

    def sampled(self) -> list[Counter[PolicyVersion]]:
        """Return, for each trace of the batch, how many tokens each version sampled; empty for a demonstration."""
        return [
            Counter() if group.ticket.kind is Kind.DEMO else tokens
            for _, group in self.admitted
            for episode in group.valid_episodes
            for tokens in sampled_by(episode)
        ]

    def newest_policy(self) -> PolicyVersion | None:
        """Return the newest version that sampled a token of the batch; None for a batch of demonstrations."""
        policies = chain.from_iterable(self.sampled())
        return max(policies, key=lambda policy: (policy.lineage, policy.version), default=None)

    def trace_index(self, policy: PolicyVersion) -> int | None:
        """Return the index of the trace that has the most tokens of `policy`; None if no trace can be used.

        The engine tells tokens apart by their version number, so a trace in which two lineages share it is no use.
        """
        sampled = self.sampled()
        usable = [
            index
            for index, tokens in enumerate(sampled)
            if tokens[policy] and [other.version for other in tokens].count(policy.version) == 1
        ]
        return max(usable, key=lambda index: sampled[index][policy], default=None)

    @property
    def evidence(self) -> list[Group]:
        """What was consumed without what was refused: a refused group teaches nothing, whatever its episodes earned."""
        return [group for group, end in self.ends() if end in (TRAINED, DropReason.ZERO_VARIANCE)]

    def ends(self) -> list[tuple[Group, str]]:
        """Return what was consumed, each group with TRAINED or the reason for which it was dropped."""
        reasons = {drop.ticket_id: drop.reason for drop in self.dropped}
        return [(group, reasons.get(group.ticket.ticket_id, TRAINED)) for group in self.consumed]

    def __post_init__(self) -> None:
        # Kept and not counted anew: it is asked for after every entry.
        self._counts = Counter(group.ticket.kind for _, group in self.admitted)

    def admit(self, sequence: int, group: Group) -> None:
        self.admitted.append((sequence, group))
        self._counts[group.ticket.kind] += 1

    def count(self, phase: Phase) -> int:
        """Return how many groups of the phase's own kind are admitted. Demonstrations in RL do not count."""
        return self._counts[phase.kind]


class Collector:
    def __init__(
        self,
        rules: Rules,
        accounts: TicketAccounts,
        cursor: int = 0,
        waiting: Waiting | None = None,
    ) -> None:
        self.rules = rules
        self.accounts = accounts
        self.waiting = waiting
        """None admits groups as they come (`rl.stale = "drop"`)."""
        self.cursor = cursor
        """Sequence of the last entry consumed."""
        self.mark = ""
        """Mark of that entry; empty before the first one."""
        self.pending = PendingBatch()
        # The ended tickets, and those of held and pending groups: an admitted group is settled at the commit.
        self._consumed = {
            kind: TicketNumbers(ended) for kind, ended in accounts.ended_ranges().items()
        }
        for number in waiting.numbers if waiting else ():
            self._consumed[Kind.TRAIN].add(number)

    @property
    def read_after(self) -> int:
        """The sequence after which to read the log: groups that the last commit held lie before the cursor."""
        return (
            min(self.waiting.unread, default=self.cursor + 1) - 1 if self.waiting else self.cursor
        )

    def read_again(self, entry: Entry, position: LearnerPosition) -> bool:
        """Return whether an entry was read before the last commit; take it if that commit held it."""
        if self.waiting is None or entry.sequence > self.cursor:
            return False
        if (number := self.waiting.unread.pop(entry.sequence, None)) is not None:
            if isinstance(entry.record, Group):
                self._consume_group(entry.sequence, entry.record, position)
            else:  # the broker's copy is damaged, or the ticket key is another one now
                self._drop(entry.sequence, Kind.TRAIN, number, DropReason.MALFORMED)
            self.admit_held(position)
        return True

    def consume(self, entry: Entry, position: LearnerPosition) -> EvalEnd | None:
        """Settle the next entry of the log, or admit it; return the outcome if it ended an eval ticket."""
        self.cursor, self.mark = entry.sequence, entry.digest
        if self.waiting is not None and self.waiting.unread:
            self._reopen(self.waiting)
        end = self._consume(entry, position)
        self.admit_held(position)
        return end

    def _consume(self, entry: Entry, position: LearnerPosition) -> EvalEnd | None:
        match entry.record:
            case DeadLetter():
                return self._consume_dead(entry)
            case Group(ticket=ticket) | Void(ticket=ticket) as record:
                if ticket.number in self._consumed[ticket.kind]:
                    self.pending.repeats += 1
                    return None
                self._consumed[ticket.kind].add(ticket.number)
                if ticket.kind is Kind.EVAL:
                    return self._evaluate(entry.sequence, record, position)
                if isinstance(record, Group):
                    self._consume_group(entry.sequence, record, position)
                else:
                    self.accounts.void(ticket.kind, ticket.number)
                    self.pending.voids.append((entry.sequence, ticket.ticket_id))
        return None

    def pass_over(self, entry: Entry) -> None:
        """Skip an entry and leave its ticket open, because the ticket has not been issued."""
        self.cursor, self.mark = entry.sequence, entry.digest
        self.pending.unissued.append(entry.sequence)

    def ended_ranges(self) -> dict[Kind, tuple[tuple[int, int], ...]]:
        """Return, by kind, the ranges of numbers beyond the lowest unsettled one whose end has been consumed."""
        floors = self.accounts.lowest_unsettled()
        # As many as the record holds: `Progress.tells` knows that nothing is said of the tickets beyond them.
        return {
            kind: numbers.ranges(floors[kind], MAX_SPANS)
            for kind, numbers in self._consumed.items()
        }

    def begin(self, position: LearnerPosition) -> None:
        """Begin the next step with the groups that are held."""
        if self.waiting is not None:
            for sequence, group in self.waiting.release():
                # After a fault: a step waits for what would become so.
                if self._is_stale(group, position):
                    self.pending.consumed.append(group)
                    self._drop(sequence, Kind.TRAIN, group.ticket.number, DropReason.STALE)
                else:
                    self.waiting.hold(sequence, group)
            self.admit_held(position)

    def _reopen(self, waiting: Waiting) -> None:
        """Open the tickets whose held groups the log has lost, so that the controller issues them again."""
        waiting.unread.clear()
        self._consumed[Kind.TRAIN] = TicketNumbers(self.accounts.ended_ranges()[Kind.TRAIN])
        for number in waiting.numbers:
            self._consumed[Kind.TRAIN].add(number)

    def admit_held(self, position: LearnerPosition) -> None:
        """Admit the groups of the step, once they can be chosen."""
        if self.waiting is None or position.phase is not Phase.RL or self.pending.count(Phase.RL):
            return
        consumed = self._consumed[Kind.TRAIN]
        chosen = self.waiting.choose(position.version, position.wanted, self.accounts, consumed)
        for sequence, group in chosen:
            self.pending.consumed.append(group)
            self.pending.admit(sequence, group)
        self.pending.admitted.sort(key=itemgetter(0))  # demonstrations were admitted as they came

    def commit(self, version: int = 0) -> PendingBatch:
        """Settle the pending groups, which `version` was trained on; return their batch, and begin a new one."""
        if self.waiting is not None:
            self.waiting.close(version, self.accounts)
        for _, group in self.pending.admitted:
            self.accounts.train(group.ticket.kind, group.ticket.number)
        trained, self.pending = self.pending, PendingBatch()
        return trained

    def batch(self, version: int, trained_by: Rules | None = None) -> Batch:
        """Return the pending groups as the batch that trains `version`, for the collector's rules or for others."""
        rules = trained_by or self.rules
        groups = [group for _, group in self.pending.admitted]
        rewards = batch_rewards(groups, rules.reward, rules.advantage)
        traces = [
            trace
            for index, group in enumerate(groups)
            # A broken one has no reward, and no baseline.
            for position, episode in enumerate(group.valid_episodes)
            for trace in traces_of(
                episode,
                group=index,
                demo=group.ticket.kind is Kind.DEMO,
                turn_rewards=rewards[index][position],
                with_states=rules.advantage.compares_states,
            )
        ]
        return Batch(traces=tuple(traces), version=version)

    def _consume_group(self, sequence: int, group: Group, position: LearnerPosition) -> None:
        ticket = group.ticket
        reason = self._refuse(group, position)
        if reason is None and self.waiting is not None and ticket.kind is Kind.TRAIN:
            self.waiting.hold(
                sequence, compacted(group) if generated_tokens(group) > LARGE_TOKENS else group
            )
        elif reason is None:
            self.pending.consumed.append(group)
            self.pending.admit(sequence, group)
        else:
            if reason is not DropReason.MALFORMED:
                self.pending.consumed.append(compacted(group))
            self._drop(sequence, ticket.kind, ticket.number, reason)

    def _evaluate(self, sequence: int, record: Group | Void, position: LearnerPosition) -> EvalEnd:
        """Settle an eval ticket. Any episodes are a result, unless their version has been rolled back."""
        ticket = record.ticket
        if isinstance(record, Void):
            self.accounts.void(Kind.EVAL, ticket.number)
            return EvalEnd(sequence, ticket.number, "void", ticket)
        reason = None if self.rules.same_model(record.provenance) else DropReason.MALFORMED
        # There is no bound on staleness here: an evaluated group trains nothing.
        if record.newest_version > position.version:
            reason = DropReason.LINEAGE
        if reason is not None:
            self.accounts.drop(Kind.EVAL, ticket.number, reason)
            return EvalEnd(sequence, ticket.number, reason.value, ticket)
        self.accounts.evaluate(ticket.number)
        return EvalEnd(sequence, ticket.number, "evaluated", ticket, record)

    def _consume_dead(self, entry: Entry) -> EvalEnd | None:
        """Settle the ticket of an undecodable message, if the message id proves which ticket that is."""
        if entry.ends is None:
            return None
        kind, number = entry.ends
        if number in self._consumed[kind]:
            return None
        self._consumed[kind].add(number)
        if kind is Kind.EVAL:
            self.accounts.drop(Kind.EVAL, number, DropReason.MALFORMED)
            return EvalEnd(entry.sequence, number, DropReason.MALFORMED.value)
        self._drop(entry.sequence, kind, number, DropReason.MALFORMED)
        return None

    def _drop(self, sequence: int, kind: Kind, number: int, reason: DropReason) -> None:
        self.accounts.drop(kind, number, reason)
        self.pending.dropped.append(Drop(sequence, f"{kind.value}-{number:08d}", reason))

    def _refuse(self, group: Group, position: LearnerPosition) -> DropReason | None:
        """Return why the group may not be trained on; None if it may."""
        demo = group.ticket.kind is Kind.DEMO
        valid = group.valid_episodes
        # First of all: nothing about a malformed group may be believed or measured.
        if not self.rules.same_model(group.provenance) or not self._well_formed(group):
            return DropReason.MALFORMED
        if group.ticket.kind is not position.phase.kind and not (demo and self.rules.demos_in_rl):
            return DropReason.PHASE
        if len(valid) < min(2, group.ticket.group_size):
            return DropReason.TOO_FEW_VALID
        # An expert has no version that could be stale, and a group of one has no variance.
        if demo:
            return None
        if group.newest_version > position.version:  # of a lineage that was rolled back behind it
            return DropReason.LINEAGE
        if self._is_stale(group, position):
            return DropReason.STALE
        if self.rules.temperature not in (None, group.ticket.sampling.temperature):
            return DropReason.TEMPERATURE
        if not self.rules.has_signal(group):
            return DropReason.ZERO_VARIANCE
        return None

    def _is_stale(self, group: Group, position: LearnerPosition) -> bool:
        return position.version - group.oldest_version > self.rules.max_staleness

    def _well_formed(self, group: Group) -> bool:
        linear_only = self.rules.advantage.linear_only and group.ticket.kind is not Kind.DEMO
        # Such an estimator follows one sequence: what comes after a turn of another branch it would get wrong.
        if linear_only and not all(episode.linear for episode in group.valid_episodes):
            return False
        for prompt_ids, turns in chain.from_iterable(
            episode.by_branch() for episode in group.valid_episodes
        ):
            ids = [prompt_ids]
            for _, turn in turns:
                if len(turn.output_ids) > group.ticket.sampling.max_turn_tokens:
                    return False
                ids += [turn.output_ids, turn.observation_ids]
            # The last observation is no part of the trace and may exceed the context, but not without bound.
            last_observation = len(ids.pop())
            if (
                sum(map(len, ids)) > self.rules.max_context_tokens
                or last_observation > self.rules.max_context_tokens
            ):
                return False
            # Such an id lies outside the embedding: it would end the learner, not only this group.
            if max((max(part) for part in ids if part), default=0) >= self.rules.vocabulary:
                return False
        return True


def generated_tokens(group: Group) -> int:
    return sum(episode.generated_tokens for episode in group.episodes)


def compacted(group: Group) -> Group:
    """Return a group whose tokens and logprobs take 4 bytes each, as on the wire.

    In tuples they take 36 and 32 bytes. A starved step may drop 160 times the groups that it trains, and as many as
    `max_staleness` steps train may be held.
    """
    episodes = [
        _pack(
            episode,
            turns=tuple(map(_pack, episode.turns)),
            branches=tuple(map(_pack, episode.branches)),
        )
        for episode in group.episodes
    ]
    return group.model_copy(update={"episodes": tuple(episodes)})


def _pack(record: R, **fields: object) -> R:
    names = PACKED.keys() & type(record).model_fields
    return record.model_copy(
        update=fields | {name: array(PACKED[name], getattr(record, name)) for name in names}
    )
