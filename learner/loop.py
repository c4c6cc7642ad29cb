"""The learner's loop: fill a batch from the group log, take a step, write it down, announce the version.

Place in the flow: Group → Batch → **Version**. Rank 0 runs it; the engine's other ranks follow its calls. What the
loop has committed is one `Commit`: a checkpoint holds exactly that, and the log holds the rest.
"""

import asyncio
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from horizonrl.broker.api import Transport
from horizonrl.broker.groups import DeadLetter, Entry, GroupLog, LogReader
from horizonrl.broker.marks import place_of
from horizonrl.broker.signing import TicketSigner
from horizonrl.broker.tickets import TicketQueue
from horizonrl.common.config.schema import RunConfig
from horizonrl.common.errors import CheckpointMismatch, LogGap, NothingToLearn, RunFailed
from horizonrl.common.logs import get_logger
from horizonrl.common.metrics import Metrics
from horizonrl.common.service import until_stopped
from horizonrl.common.state import Progress
from horizonrl.common.types import Kind, Phase, PolicyVersion
from horizonrl.learner.controller.curriculum import EvalTask
from horizonrl.learner.controller.horizon import Histories, adaptive_rules
from horizonrl.learner.engine.api import Engine, StepStats
from horizonrl.learner.engine.weights_file import WEIGHTS_FILE
from horizonrl.learner.fence import Fence
from horizonrl.learner.intake.accounts import TicketAccounts
from horizonrl.learner.intake.batch import Batch
from horizonrl.learner.intake.collector import Collector, LearnerPosition, PendingBatch, Rules
from horizonrl.learner.records.best import Best
from horizonrl.learner.records.checkpoint import Checkpoint, CheckpointStore
from horizonrl.learner.records.evaluation import Rounds, count_end, evaluation_line, mirror_evaluation, plan_digest
from horizonrl.learner.records.journal import Journal
from horizonrl.learner.records.report import StepTimes, metrics_line, mirror_metrics
from horizonrl.learner.recovery import changes, check_directory, check_identity
from horizonrl.learner.room import LogRoom
from horizonrl.learner.weights import WeightsPublisher

log = get_logger()

T = TypeVar("T")

LOOK_S = 5.0
"""Time without a group after which the learner looks whether the log has room for one."""
QUIET_S = 60.0
"""Time without a group after which the learner says what it waits for."""
STARVED_AFTER = 10
"""Batches' worth of groups that one step drops before it is said, and at every doubling; verl's DAPO gives up there."""
GIVE_UP_AFTER = 16 * STARVED_AFTER


@dataclass(frozen=True, slots=True)
class Commit:
    """Where the learner stands after a step: enough, with the engine's state and the log, to go on exactly.

    A checkpoint's state has these fields under the same names.
    """

    step: int
    cursor: int
    accounts: dict[str, Any]
    horizons: dict[str, Any] = field(default_factory=dict)
    rounds: Sequence[Mapping[str, Any]] = ()
    """Results of the evaluation rounds that are not complete."""
    mark: str = ""
    """Of the entry at the cursor (`broker/marks.py`)."""


@dataclass(frozen=True, slots=True)
class EngineThread:
    """An engine, and the one thread in which it was made and is called: torch counts its threads per thread."""

    engine: Engine
    thread: Executor
    timeout_s: float | None = None

    async def call(self, call: Callable[..., T], *arguments: Any) -> T:
        """Make a call of the engine. Raises RunFailed after `timeout_s`: its thread hangs, the process has to end.

        No deadline inside the engine is enough: DeepSpeed's collectives wait half an hour for a rank that is stuck.
        """
        try:
            async with asyncio.timeout(self.timeout_s):
                return await asyncio.get_running_loop().run_in_executor(self.thread, call, *arguments)
        except TimeoutError:
            raise RunFailed(
                f"the engine's {getattr(call, '__name__', 'call')} took longer than learner.step_timeout_s = "
                f"{self.timeout_s} s: a rank is stuck, or the batch is too large; start the learner again to resume "
                "from the last checkpoint"
            ) from None

    async def train(self, config: RunConfig, batch: Batch) -> StepStats:
        """Make `batch.version + 1`, at the rate that the config says for that step."""
        return await self.call(self.engine.train_step, batch, config.lr(batch.version))


@dataclass
class LearnerLoop:
    config: RunConfig
    transport: Transport
    engine: EngineThread
    rules: Rules
    identity: dict[str, str]
    """What a checkpoint must match to be resumed: digests of the model, the tokenizer and the template."""
    stopping: asyncio.Event
    metrics: Metrics = field(default_factory=Metrics)
    eval_tasks: Sequence[EvalTask] = ()
    """Of every evaluation round, in order."""

    def __post_init__(self) -> None:
        run_dir = self.config.run_dir
        signer = TicketSigner.load(self.config.run.name, self.config.broker.ticket_key)
        self._fence = Fence(self.transport)
        self._tickets = TicketQueue(self.transport, signer)
        self._log = GroupLog(self.transport, signer)
        self._journal = Journal(run_dir)
        self._checkpoints = CheckpointStore(run_dir / "checkpoints", keep=self.config.learner.keep_checkpoints)
        self._room = LogRoom(self.config, self.transport, self._fence, self._checkpoints)
        self._weights = WeightsPublisher(
            self.transport, self._fence, run_dir / "weights", share_files=self.config.broker.shared_files
        )
        if self.eval_tasks:
            self.identity = self.identity | {"evaluation": plan_digest(self.config, self.eval_tasks)}
        if self.config.lora.rank:
            self.identity = self.identity | {"lora.rank": str(self.config.lora.rank)}
        self._best = Best(run_dir / "best")
        self._collector = Collector(self.rules, TicketAccounts())
        self._horizons = Histories(adaptive_rules(self.config))
        self._rounds = Rounds(self.eval_tasks)
        self._commit = Commit(step=0, cursor=0, accounts=TicketAccounts().dump(), horizons=self._horizons.dump())
        self._lineage = 0
        self._issued = 0
        """Tickets that had been issued when the batch was full."""
        self._saved_step = 0
        self._sealing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sealing.set_result(None)

    async def run(self) -> None:
        """Train and evaluate to the last step, or until `stopping` is set; leave a checkpoint behind either way.

        Takes groups from the log; gives versions, progress and the journal; waits for a full batch; woken by entries
        of the log and by `stopping`, which ends every wait for the broker: a resumed learner says it all again.
        """
        async with asyncio.TaskGroup() as background:
            await until_stopped(self._resume(), self.stopping)
            reader = await self._log.read(after=self._commit.cursor)
            started = time.monotonic()
            while self._commit.step < self.config.total_steps:
                await until_stopped(self._fill(reader), self.stopping)
                if self.stopping.is_set():
                    break
                if self._missing():
                    await self._make_room(background)
                    continue
                await self._step(background, wait_s=time.monotonic() - started)
                started = time.monotonic()
            if self._saved_step < self._commit.step:
                await self._save(background)
            await self._sealing
            if self._commit.step >= self.config.total_steps:  # it may have been given fewer than it has taken
                await until_stopped(self._await_evaluations(reader), self.stopping)
        if self._commit.step >= self.config.total_steps and not self.stopping.is_set():
            await until_stopped(self._announce_progress(finished=True), self.stopping)
        log.info("learner_ended", step=self._commit.step, of=self.config.total_steps)

    @property
    def policy(self) -> PolicyVersion:
        return PolicyVersion(version=self._commit.step, lineage=self._lineage)

    async def _resume(self) -> None:
        """Take the run over where its newest checkpoint stands, on a new lineage if there was one before.

        Whoever speaks ends the learner before: all that can fail is tried first.
        """
        earlier, announced = await self._fence.look()
        checkpoint, lineages = self._checkpoints.newest(), self._journal.lineages()
        check_directory(self.config.run_dir, bool(lineages) or checkpoint is not None, earlier)
        changed: dict[str, Any] = {}
        cut = await self._find_place(checkpoint)
        if checkpoint is not None:
            check_identity(checkpoint, self.identity)
            changed = changes(checkpoint.state["config"], self._config_recorded())
            lineages.append(checkpoint.state["lineage"])
            await self.engine.call(self.engine.engine.load, checkpoint.path)
        lineages += [record.policy.lineage for record in (earlier, announced) if record is not None]
        self._lineage = max(lineages, default=-1) + 1
        digest = ""
        if self._lineage or self.eval_tasks:
            digest = await self.engine.call(self.engine.engine.write_weights, self._weights.path_for(self.policy))
        await self._fence.announce(earlier or self._progress())  # the last learner's word, which is ours from here on
        self._tell_of_start(checkpoint is not None, {"changed": changed} | cut)
        self._weights.held = self._versions_awaited()
        if self._lineage:
            await self._announce_weights(digest)
        await self._announce_progress()
        await self._room.free()

    async def _find_place(self, checkpoint: Checkpoint | None) -> dict[str, Any]:
        """Take up what a checkpoint says; return what there is to record when the log has lost entries that it counts.

        Raises CheckpointMismatch when the log does not hold what comes next.
        """
        if checkpoint is not None:
            self._take_up(checkpoint)
        cursor = self._commit.cursor
        try:
            place = await place_of(self.transport, cursor, self._commit.mark)
        except LogGap as error:
            raise CheckpointMismatch(
                f"{self.config.run_dir} cannot be resumed from step {self._commit.step}: {error}"
            ) from None
        if place == cursor:
            return {}
        log.warning("log_cut", cursor=cursor, read_on_after=place, step=self._commit.step)
        self._commit = replace(self._commit, cursor=place, mark="")
        self._collector.cursor = place
        return {"log_cut": {"cursor": cursor, "read_on_after": place}}

    def _tell_of_start(self, resumed: bool, more: dict[str, Any]) -> None:
        step, now = self._commit.step, time.time()
        self._journal.rewind(step)
        self._journal.write_lineage({"lineage": self._lineage, "from_step": step, "time": now} | more)
        log.info("learner_started", step=step, lineage=self._lineage, resumed=resumed, **more)
        self.metrics.set("learner_lineage", self._lineage)
        self.metrics.set("learner_step_timestamp_seconds", now)
        self.metrics.set("max_staleness_versions", self.rules.max_staleness)

    def _take_up(self, checkpoint: Checkpoint) -> None:
        state = checkpoint.state
        self._commit = Commit(**{of.name: state[of.name] for of in fields(Commit) if of.name in state})
        self._horizons = Histories.restore(adaptive_rules(self.config), self._commit.horizons)
        self._collector = Collector(self.rules, TicketAccounts.restore(self._commit.accounts), self._commit.cursor)
        self._rounds = Rounds(self.eval_tasks, self._commit.rounds)
        self._saved_step = self._commit.step

    def _config_recorded(self) -> dict[str, Any]:
        """Return what a resumed run is compared with: what the broker and the metrics listen on is no part of it."""
        return self.config.model_dump(mode="json", exclude={"broker", "metrics"})

    def _phase(self) -> Phase:
        return self.config.phase(self._commit.step)[0]

    async def _fill(self, reader: LogReader) -> None:
        """Consume entries until the batch is full, and tell the controller whenever there is nothing more at hand.

        Returns before that when the log is short of room, and a checkpoint would free some.
        """
        position = LearnerPosition(version=self._commit.step, phase=self._phase())
        wanted = self.config.groups_per_step(position.phase)
        pending = self._collector.pending
        starved, heard = STARVED_AFTER * wanted, time.monotonic()
        while missing := self._missing():
            entry = await reader.next(min(LOOK_S, QUIET_S))
            if entry is None:
                if await self._room.is_short(self._commit.cursor):
                    return
                if time.monotonic() - heard >= QUIET_S:
                    log.warning("groups_awaited", missing=missing, step=self._commit.step, quiet_s=QUIET_S)
                    await self._announce_progress()  # what was consumed may have had nothing but lost parts behind it
                    await self._room.check(wanted - missing, wanted, "the next step")
                    heard = time.monotonic()
                continue
            heard = time.monotonic()
            await self._consume(entry, position)
            if len(pending.dropped) == starved:
                self._tell_of_starvation(pending, wanted)
                starved *= 2
            if not reader.ahead or not self._missing():
                await self._announce_progress()
        self._issued = sum([await self._tickets.count_issued(kind) for kind in Kind])

    def _missing(self) -> int:
        """Return how many groups the next step still wants."""
        phase = self._phase()
        return max(0, self.config.groups_per_step(phase) - self._collector.pending.count(phase))

    async def _make_room(self, background: asyncio.TaskGroup) -> None:
        """Free the log behind the last commit, with a checkpoint ahead of its time if need be."""
        if self._saved_step < self._commit.step:
            await self._save(background)
        await self._sealing
        await until_stopped(self._room.free(short=True), self.stopping)

    def _tell_of_starvation(self, pending: PendingBatch, wanted: int) -> None:
        """Say that hardly any group of this step can be trained on. Raises NothingToLearn after GIVE_UP_AFTER.

        A policy that solves every task, or none, would be sampled for ever.
        """
        episodes = [episode for group in pending.consumed for episode in group.valid_episodes]
        told = {
            "step": self._commit.step,
            "missing": wanted - pending.count(self._phase()),
            "dropped": dict(Counter(drop.reason.value for drop in pending.dropped)),
            "success_rate": round(sum(episode.success for episode in episodes) / max(1, len(episodes)), 3),
        }
        log.warning("batch_starved", **told)
        if len(pending.dropped) >= GIVE_UP_AFTER * wanted:
            raise NothingToLearn(
                f"hardly any group can be trained on ({told}): the policy solves all of these tasks, or it has "
                "collapsed and solves none. Give harder or easier tasks, a larger rollout.group_size or a lower "
                "rl.lr, or export what there is (`horizonrl export`)"
            )

    async def _await_evaluations(self, reader: LogReader) -> None:
        """Consume until every evaluation has ended, the one after the last step too.

        Without an entry for `learner.step_timeout_s` nobody plays them any more: then the run ends as it is.
        """
        position = LearnerPosition(version=self._commit.step, phase=self._phase())
        due = max(await self._tickets.count_issued(Kind.EVAL), self.config.eval_rounds * len(self.eval_tasks))
        patience_s, heard = self.config.learner.step_timeout_s, time.monotonic()
        while (ended := self._collector.accounts.outcomes()[Kind.EVAL].settled) < due:
            entry = await reader.next(min(LOOK_S, QUIET_S, patience_s))
            if entry is None:
                if await self._room.is_short(self._commit.cursor):
                    await self._room.free(short=True)
                if (waited_s := time.monotonic() - heard) >= QUIET_S:
                    await self._room.check(ended, due, "the evaluations")
                if waited_s >= patience_s:
                    log.warning("evaluation_given_up", missing=due - ended, waited_s=round(waited_s))
                    return
                continue
            heard = time.monotonic()
            await self._consume(entry, position)
            if not reader.ahead:
                await self._announce_progress()

    async def _consume(self, entry: Entry, position: LearnerPosition) -> None:
        """Consume an entry; write an evaluation down when it was the last one of its round."""
        if entry.ends is not None and not await self._tickets.was_issued(*entry.ends):
            kind, number = entry.ends
            log.warning("end_of_no_ticket", sequence=entry.sequence, kind=kind.value, number=number)
            self.metrics.count("log_entries_refused_total", reason="never_issued")
            self._collector.pass_over(entry)
            return
        repeats = self._collector.pending.repeats
        end = self._collector.consume(entry, position)
        if isinstance(entry.record, DeadLetter):
            self.metrics.count("log_entries_refused_total", reason=entry.record.cause)
        elif self._collector.pending.repeats > repeats:
            self.metrics.count("log_entries_refused_total", reason="repeat")
        if end is None:
            return
        count_end(self.metrics, end)
        if end.group is not None:
            self._journal.write_held_out(self._commit.step + 1, end.group)
        results = self._rounds.add(end)
        if results is None:
            return
        line = evaluation_line(results, self.config, self.policy, settled_step=self._commit.step + 1)
        self._journal.write_evaluation(line)
        mirror_evaluation(self.metrics, line)
        judged = PolicyVersion(version=line["version"], lineage=line["lineage"])
        best = self._best.offer(line, self._weights.find(judged))
        log.info("evaluated", best=best, **{key: line[key] for key in ("version", "success_rate", "low", "high")})

    def _versions_awaited(self) -> set[int]:
        """Return the versions whose evaluation is not in: their weights may turn out to be the best."""
        ended = self._collector.accounts.lowest_unsettled()[Kind.EVAL]
        return self._rounds.awaited(self.config, ended, self._commit.step)

    async def _step(self, background: asyncio.TaskGroup, wait_s: float) -> None:
        """Take one optimizer step on the pending batch; commit weights, ledger, announcement, checkpoint, report."""
        started = time.monotonic()
        phase = self._phase()
        batch = self._collector.batch(self._commit.step)
        stats = await self._train(batch, phase)
        pending = self._collector.commit()
        step = self._commit.step + 1
        if phase is Phase.RL:
            self._horizons.observe(pending.consumed, step - self.config.imitation.steps)
        accounts, cursor, mark = self._collector.accounts.dump(), self._collector.cursor, self._collector.mark
        self._commit = Commit(step, cursor, accounts, self._horizons.dump(), self._rounds.dump(), mark)
        file = self._weights.path_for(self.policy)
        digest = await self.engine.call(self.engine.engine.write_weights, file)
        weights_bytes = file.stat().st_size
        self._journal.write_ledger(self._ledger_line(pending, batch, digest))
        self._journal.write_episodes(self._commit.step, pending.consumed)
        self._journal.free_episodes(self.config.learner.keep_episodes_bytes)
        announced = time.monotonic()
        await until_stopped(self._announce(digest), self.stopping)
        publish_s = time.monotonic() - announced
        if self._checkpoint_is_due(phase):
            await self._save(background)
        self._report(phase, pending, stats, StepTimes(wait_s, time.monotonic() - started, publish_s, weights_bytes))

    async def _announce(self, weights_digest: str) -> None:
        """Tell the actors of new weights, if they sample with them, and the controller of the step."""
        self._weights.held = self._versions_awaited()
        if self.config.publishes(self._commit.step):
            await self._announce_weights(weights_digest)
        else:
            self._weights.tidy()
        await self._announce_progress()

    async def _announce_weights(self, digest: str) -> None:
        await self._weights.announce(self.policy, digest)
        self.metrics.set("learner_policy_version", self.policy.version)

    async def _train(self, batch: Batch, phase: Phase) -> StepStats:
        gap = await self._gap_of_engines(batch) if phase is Phase.RL else None
        stats = await self.engine.train(self.config, batch)
        return stats if gap is None else replace(stats, logprob_gap_fresh=gap)

    async def _gap_of_engines(self, batch: Batch) -> float | None:
        """Compare actor and learner on one trace of the batch's newest version, where the step itself cannot.

        Returns None where the step's own comparison is that of the newest version, and NaN where neither can be had.
        """
        sampled = self._collector.pending.sampled()
        newest = max(chain.from_iterable(sampled), key=lambda policy: (policy.lineage, policy.version), default=None)
        if newest is None or newest == self.policy:
            return None
        weights = self._weights.find(newest)
        # The engine tells tokens apart by number, so a trace with the same number of two lineages would mix them.
        places = [at for at, tokens in enumerate(sampled) if [of.version for of in tokens].count(newest.version) == 1]
        best = max(places, key=lambda at: sampled[at][newest], default=None)
        if weights is None or best is None or not sampled[best][newest]:
            return math.nan
        return await self.engine.call(self.engine.engine.logprob_gap_at, batch.traces[best], newest.version, weights)

    def _checkpoint_is_due(self, phase: Phase) -> bool:
        phase_ended = self._phase() is not phase or self._commit.step == self.config.total_steps
        return phase_ended or self._commit.step % self.config.learner.checkpoint_every == 0

    async def _save(self, background: asyncio.TaskGroup) -> None:
        """Write a checkpoint of the last commit; it becomes durable and visible while the next step goes on."""
        await self._sealing  # the one before
        started = time.monotonic()
        also = {"lineage": self._lineage, "identity": self.identity, "config": self._config_recorded()}
        state = asdict(self._commit) | also
        frame = self._weights.path_for(self.policy)

        def save(directory: Path) -> None:
            self.engine.engine.save(directory, state)
            os.link(frame, directory / WEIGHTS_FILE)

        await self.engine.call(self._checkpoints.fill, self._commit.step, save)
        stall_s = time.monotonic() - started
        self.metrics.observe("checkpoint_seconds", stall_s)
        self._saved_step = self._commit.step
        self._sealing = background.create_task(self._seal(self._commit.step, state, stall_s))

    async def _seal(self, step: int, state: Mapping[str, Any], stall_s: float) -> None:
        """Make a checkpoint durable, then free what of the log it makes superfluous."""
        started = time.monotonic()
        await asyncio.to_thread(self._checkpoints.seal, step, state)
        log.info(
            "checkpoint_written", step=step, stall_s=round(stall_s, 2), seal_s=round(time.monotonic() - started, 2)
        )
        await until_stopped(self._room.free(), self.stopping)

    async def _announce_progress(self, finished: bool = False) -> None:
        """Say where the run stands. Raises Fenced when another learner has spoken since this one last did."""
        await self._fence.announce(self._progress(finished))

    def _progress(self, finished: bool = False) -> Progress:
        phase, phase_step = self.config.phase(self._commit.step)
        accounts = self._collector.accounts
        return Progress(
            step=self._commit.step,
            phase=phase,
            phase_step=phase_step,
            policy=self.policy,
            cursor=self._collector.cursor,
            outcomes=accounts.outcomes(),
            lowest_unsettled=accounts.lowest_unsettled(),
            ended_ranges=self._collector.ended_ranges(),
            growths=self._horizons.growths(),
            finished=finished,
        )

    def _ledger_line(self, pending: PendingBatch, batch: Batch, weights_digest: str) -> dict[str, Any]:
        return {
            "step": self._commit.step,
            "version": self.policy.version,
            "lineage": self.policy.lineage,
            "cursor": self._commit.cursor,
            "trained": [[sequence, group.ticket.ticket_id] for sequence, group in pending.admitted],
            "dropped": [[drop.sequence, drop.ticket_id, drop.reason.value] for drop in pending.dropped],
            "voids": [[sequence, ticket_id] for sequence, ticket_id in pending.voids],
            "actors": {group.ticket.ticket_id: group.provenance.actor for _, group in pending.admitted},
            "repeats": pending.repeats,
            "never_issued": pending.unissued,
            "data_digest": batch.digest(),
            "weights_digest": weights_digest,
        }

    def _report(self, phase: Phase, pending: PendingBatch, stats: StepStats, times: StepTimes) -> None:
        settled = sum(ends.settled for ends in self._collector.accounts.outcomes().values())
        rl_step = self._commit.step - self.config.imitation.steps
        grown = [growth for growth in self._horizons.growths() if growth.phase_step == rl_step]
        line = metrics_line(phase, self.policy, pending, stats, times)
        line |= {"tickets_issued": self._issued, "tickets_outstanding": self._issued - settled}
        line["growths"] = [growth.model_dump() for growth in grown]
        self._journal.write_metrics(line)
        mirror_metrics(self.metrics, line, pending)
        for growth in grown:
            self.metrics.count("horizon_growths_total", env=growth.env_id)
            log.info("horizon_grown", **growth.model_dump())
        log.info("step_taken", **{key: line[key] for key in ("step", "phase", "success_rate", "reward_mean", "step_s")})
