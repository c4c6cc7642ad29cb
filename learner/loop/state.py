"""What the learner knows of its run: what it has consumed, what it has committed, and the `Progress` that follows.

Place in the flow: between the collector, which settles entries, and everyone who tells or stores where the run stands.
Pure logic over records: no broker, no disk, no engine. A checkpoint holds the `Commit`, and the log holds the rest.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from horizonrl.common.config.schedule import RunSchedule
from horizonrl.common.state import Progress
from horizonrl.common.types import Kind, Phase, PolicyVersion
from horizonrl.learner.algorithm.batch import Batch
from horizonrl.learner.controller.curriculum import Curriculum, EvalTask
from horizonrl.learner.controller.horizon import Histories, adaptive_rules
from horizonrl.learner.controller.yields import Yields
from horizonrl.learner.intake.accounts import TicketAccounts
from horizonrl.learner.intake.collector import Collector, LearnerPosition, PendingBatch, Rules
from horizonrl.learner.intake.waiting import waiting_for
from horizonrl.learner.records.evaluation import Rounds


@dataclass(frozen=True, slots=True)
class Commit:
    """Where the learner stands after a step. With the engine's state and the log, it is enough to continue exactly.

    A checkpoint's state has these fields under the same names.
    """

    step: int
    cursor: int
    accounts: dict[str, Any]
    horizons: dict[str, Any] = field(default_factory=dict)
    yields: Sequence[Mapping[str, Any]] = ()
    repeats: Sequence[Mapping[str, Any]] = ()
    rounds: Sequence[Mapping[str, Any]] = ()
    """Results of the evaluation rounds that are not complete."""
    mark: str = ""
    """Mark of the entry at the cursor (`broker/log_continuity.py`)."""
    waiting: Mapping[str, Any] = field(default_factory=dict)
    """Deadlines of tickets, and the groups up to the cursor that are held for a later step (`intake/waiting.py`)."""


class LearnerState:
    def __init__(
        self,
        schedule: RunSchedule,
        rules: Rules,
        curriculum: Curriculum,
        eval_tasks: Sequence[EvalTask] = (),
    ) -> None:
        self.schedule = schedule
        self.rules = rules
        self.curriculum = curriculum
        self.eval_tasks = eval_tasks
        self.lineage = 0
        self.last_commit = Commit(step=0, cursor=0, accounts=TicketAccounts().dump())
        self.collector = Collector(rules, TicketAccounts(), waiting=waiting_for(schedule))
        self.horizons = Histories(adaptive_rules(schedule))
        self.yields = Yields(curriculum.sources)
        self.rounds = Rounds(eval_tasks)
        self.last_commit = replace(self.last_commit, horizons=self.horizons.dump())

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the commit in a checkpoint's state."""
        # A checkpoint also holds more than the commit.
        self.last_commit = Commit(**{field.name: state[field.name] for field in fields(Commit)})
        accounts = TicketAccounts.restore(self.last_commit.accounts)
        waiting = waiting_for(self.schedule, self.last_commit.waiting)
        self.collector = Collector(self.rules, accounts, self.last_commit.cursor, waiting)
        # The next step may find all its groups among those that are held: then its commit is at this entry too.
        self.collector.mark = self.last_commit.mark
        self.horizons = Histories.restore(adaptive_rules(self.schedule), self.last_commit.horizons)
        self.yields = Yields(self.curriculum.sources)
        self.yields.restore(self.last_commit.yields, self.last_commit.repeats)
        self.rounds = Rounds(self.eval_tasks, self.last_commit.rounds)

    def move_cursor(self, cursor: int) -> None:
        """Read on from another place: the log has lost the entry at the cursor, and what was read is read again."""
        # The mark belonged to an entry that is gone. An empty one is not compared.
        self.last_commit = replace(self.last_commit, cursor=cursor, mark="")
        waiting = waiting_for(self.schedule, self.last_commit.waiting, held=False)
        self.collector = Collector(self.rules, self.collector.accounts, cursor, waiting)

    @property
    def step(self) -> int:
        """Steps committed; also the version that the next step trains."""
        return self.last_commit.step

    @property
    def policy(self) -> PolicyVersion:
        return PolicyVersion(version=self.step, lineage=self.lineage)

    @property
    def phase(self) -> Phase:
        """Phase of the step in the making."""
        return self.schedule.phase(self.step)[0]

    @property
    def position(self) -> LearnerPosition:
        return LearnerPosition(version=self.step, phase=self.phase, wanted=self.groups_wanted)

    @property
    def complete(self) -> bool:
        """The last step is committed. A run may also have been given fewer steps than it has taken."""
        return self.step >= self.schedule.total_steps

    @property
    def groups_wanted(self) -> int:
        """Groups that make the next step."""
        return self.schedule.groups_per_step(self.phase)

    @property
    def groups_missing(self) -> int:
        """Groups that the next step still needs: one at least until it has them all, though more are held."""
        missing = max(0, self.groups_wanted - self.collector.pending.count(self.phase))
        return min(missing, max(1, missing - self.groups_held))

    @property
    def groups_held(self) -> int:
        """Groups that have come and are held until it is clear which step trains them."""
        waiting = self.collector.waiting
        return 0 if waiting is None else len(waiting.numbers)

    @property
    def groups_at_most(self) -> int:
        """Most groups that the log has to keep for steps to come."""
        if self.collector.waiting is None or self.phase is not Phase.RL:
            return self.groups_wanted
        return self.schedule.outstanding_limit(*self.schedule.phase(self.step))

    def batch(self) -> Batch:
        """Return the pending groups as the batch that trains the present version."""
        return self.collector.batch(self.step)

    def commit(self) -> PendingBatch:
        """Commit the step that was trained on the pending batch, and return that batch."""
        # The phase of the step that ends here, not of the next one.
        phase, step = self.phase, self.step + 1
        pending = self.collector.commit(self.step)
        waiting, accounts = self.collector.waiting, self.collector.accounts
        if phase is Phase.RL:
            # All that was consumed, dropped groups included. Folded here, so that a decision and the data behind it are
            # one commit.
            self.horizons.observe(pending.consumed, step - self.schedule.imitation.steps)
            self.yields.observe(pending.evidence, self.rules.differs)
        self.last_commit = Commit(
            step=step,
            cursor=self.collector.cursor,
            accounts=accounts.dump(),
            horizons=self.horizons.dump(),
            yields=[category.model_dump(mode="json") for category in self.yields.all()],
            repeats=[tasks.model_dump(mode="json") for tasks in self.yields.repeats()],
            rounds=self.rounds.dump(),
            mark=self.collector.mark,
            waiting={} if waiting is None else waiting.dump(accounts),
        )
        self.collector.begin(self.position)
        return pending

    def awaited(self) -> dict[str, Any]:
        """Return the ticket that the next step waits for although there are groups enough; empty if it does not."""
        waiting = self.collector.waiting
        if waiting is None or waiting.awaited is None:
            return {}
        number, version = waiting.awaited
        return {
            "ticket": f"{Kind.TRAIN.value}-{number:08d}",
            "trainable_until_version": version,
            "groups_held": self.groups_held,
        }

    def versions_awaited(self) -> set[int]:
        """Return the versions whose evaluation is not complete: one of them may turn out to be the best."""
        ended = self.collector.accounts.lowest_unsettled()[Kind.EVAL]
        return self.rounds.awaited(self.schedule, ended, self.step)

    def progress(self, finished: bool = False) -> Progress:
        """Return what the learner announces: the committed step, and the ends consumed so far."""
        phase, phase_step = self.schedule.phase(self.step)
        accounts = self.collector.accounts
        return Progress(
            step=self.step,
            phase=phase,
            phase_step=phase_step,
            policy=self.policy,
            # Ahead of the commit: the controller may replace a ticket as soon as its end is read. If the learner dies,
            # these counts go back for a moment, and the controller only issues later (ADR 1).
            cursor=self.collector.cursor,
            outcomes=accounts.outcomes(),
            lowest_unsettled=accounts.lowest_unsettled(),
            ended_ranges=self.collector.ended_ranges(),
            awaited=self.awaited().get("ticket"),
            growths=self.horizons.growths(),
            yields=self.yields.all(),
            repeats=self.yields.repeats(),
            finished=finished,
        )
