"""The learner's loop: fill a batch from the group log, take a step, record it, announce the version.

Place in the flow: Group → Batch → **Version**. Rank 0 runs it; the engine's other ranks follow its calls. A checkpoint
holds exactly what the loop has committed (`Commit`), and the log holds the rest.
"""

import asyncio
import math
import time
from dataclasses import dataclass, replace

from horizonrl.broker.agreement import stays_agreed
from horizonrl.common.logs import get_logger
from horizonrl.common.service import until_stopped
from horizonrl.common.types import Phase
from horizonrl.learner.algorithm.batch import Batch
from horizonrl.learner.engine.api import StepStats
from horizonrl.learner.loop.log_intake import LogIntake
from horizonrl.learner.loop.ports import Ports
from horizonrl.learner.loop.publication import Publication
from horizonrl.learner.loop.recovery import Recovery
from horizonrl.learner.loop.state import LearnerState
from horizonrl.learner.records.report import TakenStep

log = get_logger()


@dataclass
class LearnerLoop:
    """`learner/main.py` builds its parts."""

    ports: Ports
    state: LearnerState
    intake: LogIntake
    publication: Publication
    recovery: Recovery
    checkpoint_every: int
    """Steps between two checkpoints."""

    async def run(self) -> None:
        """Train and evaluate to the last step, or until `stopping` is set; leave a checkpoint behind either way.

        Takes groups from the log. Gives versions, progress and the journal. Waits for a full batch; woken by entries
        of the log and by `stopping`. That event ends every wait for the broker: a resumed learner announces all of it
        again.
        """
        state = self.state
        self.ports.metrics.set("run_finished", 0)
        # A version is published and a checkpoint becomes durable in this group while the next step trains. If that
        # fails, the run ends.
        async with asyncio.TaskGroup() as background:
            agreeing = background.create_task(
                stays_agreed(self.ports.transport, self.ports.settings)
            )
            await until_stopped(self.recovery.resume(), self.ports.stopping)
            # Only after `resume`: it moves the cursor if the broker has lost the end of the log.
            reader = await self.ports.log.read(after=state.collector.read_after)
            started = time.monotonic()
            while not state.complete:
                await until_stopped(self.intake.fill(reader), self.ports.stopping)
                # The half-made batch is not saved: the log still holds it, and a resumed learner decides the same again
                # (ADR 1).
                if self.ports.stopping.is_set():
                    break
                # The log is short of space, and may have none for more groups.
                if state.groups_missing:
                    await self._free_log(background)
                    continue
                await self._step(background, wait_s=time.monotonic() - started)
                started = time.monotonic()
            # Also when the run is stopped early: every step since the last checkpoint would have to be trained again.
            await self.recovery.save(background)
            await self.recovery.saved()
            await self.publication.ended()
            await self.publication.recorder.written()
            if state.complete:  # the last round judges the last version, so it has only just begun
                await until_stopped(self.intake.await_evaluations(reader), self.ports.stopping)
            agreeing.cancel()
        # The last word of the run: actors and `train` end at it, so the checkpoint and the evaluations have to be in.
        if state.complete and not self.ports.stopping.is_set():
            await until_stopped(self.publication.announcer.announce_end(), self.ports.stopping)
            self.ports.metrics.set("run_finished", float(not self.ports.stopping.is_set()))
        log.info("learner_ended", step=state.step, of=state.schedule.total_steps)

    async def _free_log(self, background: asyncio.TaskGroup) -> None:
        """Free the log behind the last commit, with an early checkpoint if there is none of it."""
        # Durable first: a crash may go back to any checkpoint that is kept, and has to find the entries after it.
        await self.recovery.save(background)
        await self.recovery.saved()
        await until_stopped(self.recovery.log_space.free(short=True), self.ports.stopping)

    async def _step(self, background: asyncio.TaskGroup, wait_s: float) -> None:
        """Train on the pending batch, commit the step, and begin to publish its version, and to save it when due."""
        started, began_at = time.monotonic(), time.time()
        # Read before the commit, which may move the run into its next phase.
        state, phase = self.state, self.state.phase
        # In a thread: the arrays of 88 M tokens take two minutes to fill.
        batch = await asyncio.to_thread(state.batch)
        stats = await self._train(batch, phase)
        self.recovery.count_stall()
        await self.publication.ended()  # one version at a time
        # Nothing is committed before the engine has returned: a step that raises leaves its groups to the log.
        pending = state.commit()
        issued = self.intake.tickets_issued
        settled = sum(outcomes.settled for outcomes in state.collector.accounts.outcomes().values())
        step = TakenStep(
            phase=phase,
            policy=state.policy,
            cursor=state.last_commit.cursor,
            pending=pending,
            batch=batch,
            stats=stats,
            tickets_issued=issued,
            tickets_outstanding=issued - settled,
            began_at=began_at,
            wait_s=wait_s,
        )
        step_s = await self.publication.begin(background, step)
        phase_ended = state.complete or state.phase is not phase
        if phase_ended or state.step % self.checkpoint_every == 0:
            await self.recovery.save(background)
        step_s.set_result(time.monotonic() - started)

    async def _train(self, batch: Batch, phase: Phase) -> StepStats:
        # Nothing sampled a demonstration, and its recorded logprobs are 0: imitation has nothing to compare.
        gap = await self._measure_gap(batch) if phase is Phase.RL else None
        stats = await self.ports.engine.train_step(batch, self.state.schedule.lr(batch.version))
        return stats if gap is None else replace(stats, logprob_gap_fresh=gap)

    async def _measure_gap(self, batch: Batch) -> float | None:
        """Compare actor and learner on one trace of the newest version in the batch, if the step itself cannot.

        Returns None if the batch has tokens of the version in training: the step's own comparison is over those.
        Returns NaN if the comparison is impossible: that version's weights or a usable trace are gone.
        """
        pending = self.state.collector.pending
        newest = pending.newest_policy()
        if newest is None or newest == self.state.policy:
            return None
        trace = pending.trace_index(newest)
        with self.publication.weights.reading(newest) as weights:
            if weights is None or trace is None:
                return math.nan
            return await self.ports.engine.logprob_gap_at(
                batch.traces[trace], newest.version, weights
            )
