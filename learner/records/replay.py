"""Replay: retrain steps from a checkpoint and the group log alone. No actor, no inference engine, no announcements.

The collector makes the same decisions again, because they depend on the log's order and the version alone. On one CPU
rank every digest equals the ledger's. Another objective is trained on the same groups.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horizonrl.broker.api import Transport
from horizonrl.broker.groups import GroupLog
from horizonrl.broker.log_continuity import resume_position
from horizonrl.common.config.schedule import RunSchedule
from horizonrl.common.errors import RunFailed
from horizonrl.learner.algorithm.batch import Batch
from horizonrl.learner.engine.api import StepStats
from horizonrl.learner.engine.thread import EngineThread
from horizonrl.learner.intake.accounts import TicketAccounts
from horizonrl.learner.intake.collector import Collector, LearnerPosition, Rules
from horizonrl.learner.intake.waiting import waiting_for
from horizonrl.learner.records.checkpoint import Checkpoint

ENTRY_WAIT_S = 30.0
"""Longest wait for an entry. The log is complete, so only a broker that is cut off makes an entry late."""


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    step: int
    stats: StepStats
    groups_equal: bool
    """The same groups were trained, in the same order."""
    data_equal: bool
    """The same tokens, logprobs and advantages reached the engine."""
    weights_equal: bool

    @property
    def equal(self) -> bool:
        return self.groups_equal and self.data_equal and self.weights_equal


@dataclass(slots=True)
class Replay:
    schedule: RunSchedule
    transport: Transport
    log: GroupLog
    engine: EngineThread
    rules: Rules
    """Those of the run, by which the same groups are trained."""
    frame: Path
    """The file in which each step's weights take the place of those before."""
    lineages: Sequence[Mapping[str, Any]] = ()
    """Lines of `lineages.jsonl`: they show where the broker had lost a part of the log."""
    kept_in: Path | None = None
    """A directory to make for what a replay with another config goes on from."""
    trained_by: Rules | None = None
    """Another objective's rules, by which rewards and advantages are made; None: the run's."""
    end: Checkpoint | None = None
    """What is there, once the last step has been retrained."""

    async def steps(
        self, start: Checkpoint | None, ledger: Sequence[Mapping[str, Any]]
    ) -> AsyncIterator[ReplayedStep]:
        """Retrain the consecutive steps of `ledger`, from `start` on; None starts from the model.

        Raises LogGap if the entries after the start have been freed. Raises RunFailed if the log ends before the last
        step, or if the broker has lost what a step was trained on.
        """
        collector = Collector(self.rules, TicketAccounts(), waiting=waiting_for(self.schedule))
        if start is not None:
            await self.engine.load(start.path)
            cursor = await resume_position(self.transport, start.cursor, start.mark)
            waiting = waiting_for(
                self.schedule, start.state.get("waiting"), held=cursor == start.cursor
            )
            collector = Collector(
                self.rules, TicketAccounts.restore(start.state["accounts"]), cursor, waiting
            )
        reader = await self.log.read(after=collector.read_after)
        for line in ledger:
            step = int(line["step"])
            # Step s trains version s − 1. With the same phase and version the collector decides as it did.
            phase, _ = self.schedule.phase(step - 1)
            position = LearnerPosition(
                version=step - 1, phase=phase, wanted=self.schedule.groups_per_step(phase)
            )
            collector.begin(position)
            lost: list[tuple[int, int]] = []
            while collector.pending.count(phase) < position.wanted:
                entry = await reader.next(ENTRY_WAIT_S)
                if entry is None:
                    self._check_lost(step, equal=False)
                    raise RunFailed(
                        f"the group log ends at {collector.cursor}, before step {step} is complete: replay up to "
                        f"step {step - 1} with --to, or with the config that the run had"
                    )
                if any(first <= entry.sequence <= last for first, last in line.get("holes", ())):
                    continue  # a replica that is whole again has what the run did not
                lost += [hole for hole in entry.holes if list(hole) not in line.get("holes", ())]
                if collector.read_again(entry, position):
                    continue
                # The log alone does not show this.
                if entry.sequence in line.get("never_issued", ()):
                    collector.pass_over(entry)
                    continue
                collector.consume(entry, position)
            batch = collector.batch(step - 1, self.trained_by)
            self._refuse_branches(step, batch)
            trained = [
                [sequence, group.ticket.ticket_id]
                for sequence, group in collector.commit(step - 1).admitted
            ]
            if lost and trained != line["trained"]:
                first, last = lost[0]
                raise RunFailed(
                    f"the broker does not hold entries {first} to {last} of the group log any more, which step {step} "
                    "may have been trained on: a file of its store is damaged. In a cluster, restart the damaged "
                    f"server without its store; else replay what came before with --to {step - 1}"
                )
            self._check_lost(
                step, equal=trained == line["trained"] and batch.digest() == line["data_digest"]
            )
            stats = await self.engine.train_step(batch, self.schedule.lr(batch.version))
            yield ReplayedStep(
                step=step,
                stats=stats,
                groups_equal=trained == line["trained"],
                data_equal=batch.digest() == line["data_digest"],
                weights_equal=await self.engine.write_weights(self.frame) == line["weights_digest"],
            )
        await reader.close()
        if self.kept_in is not None:
            await self._keep(self.kept_in, step, collector)

    async def _keep(self, directory: Path, step: int, collector: Collector) -> None:
        waiting, accounts = collector.waiting, collector.accounts
        state = {
            "cursor": collector.cursor,
            "mark": collector.mark,
            "accounts": accounts.dump(),
            "waiting": {} if waiting is None else waiting.dump(accounts),
        }
        await asyncio.to_thread(directory.mkdir)
        await self.engine.save(directory, state)
        self.end = Checkpoint(step, directory, state)

    def _refuse_branches(self, step: int, batch: Batch) -> None:
        """Raise RunFailed if a step has groups that the objective would not have been given."""
        advantage = (self.trained_by or self.rules).advantage
        branched = any(trace.episode is not None and not trace.demo for trace in batch.traces)
        if advantage.linear_only and branched:
            raise RunFailed(
                f"step {step} has episodes of several branches, and advantage.kind {advantage.kind} follows one token "
                f"sequence: stop before it with --to {step - 1}, or choose another kind"
            )

    def _check_lost(self, step: int, equal: bool) -> None:
        """Raise RunFailed if a step has other groups now, because the broker lost them before a later start."""
        cuts = [
            line["from_step"]
            for line in self.lineages
            if "log_cut" in line and line["from_step"] >= step
        ]
        if cuts and not equal:
            raise RunFailed(
                f"the group log lost what step {step} was trained on in a power cut of the broker, before the learner "
                f"resumed from step {cuts[0]}: replay what came before with --to {step - 1}, or what came after with "
                f"--from {cuts[0]}"
            )
