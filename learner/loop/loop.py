"""The learner's loop: fill a batch from the group log, take a step, record it, announce the version.

Place in the flow: Group → Batch → **Version**. Rank 0 runs it; the engine's other ranks follow its calls. A checkpoint
holds exactly what the loop has committed (`Commit`), and the log holds the rest.
"""

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from horizonrl.broker.agreement import stays_agreed
from horizonrl.broker.api import Transport
from horizonrl.broker.groups import GroupLog
from horizonrl.broker.signing import TicketSigner
from horizonrl.broker.tickets import TicketQueue
from horizonrl.common.config.schema import RunConfig
from horizonrl.common.logs import get_logger
from horizonrl.common.metrics import Metrics
from horizonrl.common.service import until_stopped
from horizonrl.common.types import Phase
from horizonrl.learner.algorithm.batch import Batch
from horizonrl.learner.controller.curriculum import EvalTask
from horizonrl.learner.engine.api import StepStats
from horizonrl.learner.engine.thread import EngineThread
from horizonrl.learner.intake.collector import Rules
from horizonrl.learner.loop.announcer import Announcer
from horizonrl.learner.loop.fence import Fence
from horizonrl.learner.loop.log_intake import LogIntake
from horizonrl.learner.loop.log_space import LogSpace
from horizonrl.learner.loop.publication import Publication
from horizonrl.learner.loop.recorder import Recorder
from horizonrl.learner.loop.recovery import Recovery, run_identity
from horizonrl.learner.loop.state import LearnerState
from horizonrl.learner.loop.weights import WeightsPublisher
from horizonrl.learner.records.best import Best
from horizonrl.learner.records.checkpoint import CheckpointStore
from horizonrl.learner.records.journal import Journal
from horizonrl.learner.records.report import TakenStep

log = get_logger()


@dataclass
class LearnerLoop:
    config: RunConfig
    transport: Transport
    engine: EngineThread
    rules: Rules
    model_identity: Mapping[str, str]
    """Digests of the model, the tokenizer and the template: a checkpoint must match them to be resumed."""
    stopping: asyncio.Event
    metrics: Metrics = field(default_factory=Metrics)
    eval_tasks: Sequence[EvalTask] = ()
    """The tasks of every evaluation round, in order."""

    def __post_init__(self) -> None:
        config, transport, metrics = self.config, self.transport, self.metrics
        signer = TicketSigner.load(config.run.name, config.broker.ticket_key)
        self._settings = config.settings.model_copy(update={"ticket_key": signer.fingerprint})
        self._log = GroupLog(transport, signer)
        self._state = LearnerState(config, self.rules, self.eval_tasks)
        fence, journal = Fence(transport), Journal(config.run_dir)
        checkpoints = CheckpointStore(config.run_dir / "checkpoints", keep=config.learner.keep_checkpoints)
        self._log_space = LogSpace(config, transport, fence, checkpoints)
        self._weights = WeightsPublisher(
            transport, fence, config.run_dir / "weights", config.broker.shared_files, metrics=metrics
        )
        self._announcer = Announcer(self._state, fence, self._weights, self.engine, metrics)
        self._recorder = Recorder(self._state, journal, Best(config.run_dir / "best"), self._weights, metrics)
        self._publication = Publication(
            self._state, self.engine, self._weights, self._announcer, self._recorder, self.stopping
        )
        self._intake = LogIntake(
            state=self._state,
            tickets=TicketQueue(transport, signer),
            announcer=self._announcer,
            recorder=self._recorder,
            log_space=self._log_space,
            metrics=metrics,
        )
        self._recovery = Recovery(
            state=self._state,
            identity=run_identity(config, self.model_identity, self.eval_tasks),
            transport=transport,
            engine=self.engine,
            fence=fence,
            announcer=self._announcer,
            weights=self._weights,
            checkpoints=checkpoints,
            journal=journal,
            recorder=self._recorder,
            publication=self._publication,
            log_space=self._log_space,
            metrics=metrics,
            stopping=self.stopping,
        )

    async def run(self) -> None:
        """Train and evaluate to the last step, or until `stopping` is set; leave a checkpoint behind either way.

        Takes groups from the log. Gives versions, progress and the journal. Waits for a full batch; woken by entries
        of the log and by `stopping`. That event ends every wait for the broker: a resumed learner announces all of it
        again.
        """
        state = self._state
        self.metrics.set("run_finished", 0)
        # A version is published and a checkpoint becomes durable in this group while the next step trains. If that
        # fails, the run ends.
        async with asyncio.TaskGroup() as background:
            agreeing = background.create_task(stays_agreed(self.transport, self._settings))
            await until_stopped(self._recovery.resume(), self.stopping)
            # Only after `resume`: it moves the cursor if the broker has lost the end of the log.
            reader = await self._log.read(after=state.collector.read_after)
            started = time.monotonic()
            while not state.complete:
                await until_stopped(self._intake.fill(reader), self.stopping)
                # The half-made batch is not saved: the log still holds it, and a resumed learner decides the same again
                # (ADR 1).
                if self.stopping.is_set():
                    break
                if state.groups_missing:  # the log is short of space, and may have none for more groups
                    await self._free_log(background)
                    continue
                await self._step(background, wait_s=time.monotonic() - started)
                started = time.monotonic()
            # Also when the run is stopped early: every step since the last checkpoint would have to be trained again.
            await self._recovery.save(background)
            await self._recovery.saved()
            await self._publication.ended()
            await self._recorder.written()
            if state.complete:  # the last round judges the last version, so it has only just begun
                await until_stopped(self._intake.await_evaluations(reader), self.stopping)
            agreeing.cancel()
        # The last word of the run: actors and `train` end at it, so the checkpoint and the evaluations have to be in.
        if state.complete and not self.stopping.is_set():
            await until_stopped(self._announcer.announce_end(), self.stopping)
            self.metrics.set("run_finished", float(not self.stopping.is_set()))
        log.info("learner_ended", step=state.step, of=self.config.total_steps)

    async def _free_log(self, background: asyncio.TaskGroup) -> None:
        """Free the log behind the last commit, with an early checkpoint if there is none of it."""
        # Durable first: a crash may go back to any checkpoint that is kept, and has to find the entries after it.
        await self._recovery.save(background)
        await self._recovery.saved()
        await until_stopped(self._log_space.free(short=True), self.stopping)

    async def _step(self, background: asyncio.TaskGroup, wait_s: float) -> None:
        """Train on the pending batch, commit the step, and begin to publish its version, and to save it when due."""
        started, began_at = time.monotonic(), time.time()
        # Read before the commit, which may move the run into its next phase.
        state, phase = self._state, self._state.phase
        # In a thread: the arrays of 88 M tokens take two minutes to fill.
        batch = await asyncio.to_thread(state.batch)
        stats = await self._train(batch, phase)
        self._recovery.count_stall()
        await self._publication.ended()  # one version at a time
        # Nothing is committed before the engine has returned: a step that raises leaves its groups to the log.
        pending = state.commit()
        issued = self._intake.tickets_issued
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
        step_s = await self._publication.begin(background, step)
        phase_ended = state.complete or state.phase is not phase
        if phase_ended or state.step % self.config.learner.checkpoint_every == 0:
            await self._recovery.save(background)
        step_s.set_result(time.monotonic() - started)

    async def _train(self, batch: Batch, phase: Phase) -> StepStats:
        # Nothing sampled a demonstration, and its recorded logprobs are 0: imitation has nothing to compare.
        gap = await self._measure_gap(batch) if phase is Phase.RL else None
        stats = await self.engine.train_step(batch, self.config.lr(batch.version))
        return stats if gap is None else replace(stats, logprob_gap_fresh=gap)

    async def _measure_gap(self, batch: Batch) -> float | None:
        """Compare actor and learner on one trace of the newest version in the batch, if the step itself cannot.

        Returns None if the batch has tokens of the version in training: the step's own comparison is over those.
        Returns NaN if the comparison is impossible: that version's weights or a usable trace are gone.
        """
        pending = self._state.collector.pending
        newest = pending.newest_policy()
        if newest is None or newest == self._state.policy:
            return None
        trace = pending.trace_index(newest)
        with self._weights.reading(newest) as weights:
            if weights is None or trace is None:
                return math.nan
            return await self.engine.logprob_gap_at(batch.traces[trace], newest.version, weights)
