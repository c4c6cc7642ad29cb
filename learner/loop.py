"""The learner's loop: fill a batch from the group log, take a step, write it down, announce the version.

Place in the flow: Group → Batch → **Version**. Rank 0 runs it; the engine's other ranks follow its calls. What the
loop has committed is one `Commit`: a checkpoint holds exactly that, and the log holds the rest.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from horizonrl.broker.api import Key, Transport
from horizonrl.broker.groups import Entry, GroupLog, LogReader
from horizonrl.broker.state import StateStore
from horizonrl.broker.tickets import TicketQueue
from horizonrl.common.config import RunConfig
from horizonrl.common.errors import CheckpointError, RunFailed
from horizonrl.common.logs import get_logger
from horizonrl.common.metrics import Metrics
from horizonrl.common.types import Kind, Phase, PolicyVersion, Progress
from horizonrl.learner.api import Engine, Objective, StepStats
from horizonrl.learner.batch import Batch
from horizonrl.learner.checkpoint import CheckpointStore
from horizonrl.learner.collector import Collector, Draft, Rules, Standing
from horizonrl.learner.journal import Journal
from horizonrl.learner.report import StepTimes, metrics_line, mirror_metrics
from horizonrl.learner.settlement import Books
from horizonrl.learner.weights import WeightsPublisher

log = get_logger()

T = TypeVar("T")

QUIET_S = 60.0
"""Time without a group after which the learner says what it waits for."""


@dataclass(frozen=True, slots=True)
class Commit:
    """Where the learner stands after a step: enough, with the engine's state and the log, to go on exactly."""

    step: int
    cursor: int
    books: dict[str, Any]


@dataclass
class LearnerLoop:
    config: RunConfig
    transport: Transport
    engine: Engine
    engine_thread: Executor
    """The one thread in which the engine was made and is called: torch counts its threads per thread."""
    rules: Rules
    identity: dict[str, str]
    """What a checkpoint must match to be resumed: digests of the model, the tokenizer and the template."""
    stopping: asyncio.Event
    metrics: Metrics = field(default_factory=Metrics)

    def __post_init__(self) -> None:
        run_dir = self.config.run_dir
        self._state = StateStore(self.transport)
        self._tickets = TicketQueue(self.transport)
        self._log = GroupLog(self.transport)
        self._journal = Journal(run_dir)
        self._checkpoints = CheckpointStore(run_dir / "checkpoints", keep=self.config.learner.keep_checkpoints)
        self._weights = WeightsPublisher(
            self.transport, run_dir / "weights", share_files=self.config.broker.shared_files
        )
        self._collector = Collector(self.rules, Books())
        self._commit = Commit(step=0, cursor=0, books=Books().dump())
        self._lineage = 0
        self._saved_step = 0

    async def run(self) -> None:
        """Train until the last step, or until `stopping` is set; leave a checkpoint behind either way.

        Takes groups from the log; gives versions, progress and the journal; waits for a full batch; woken by entries
        of the log and by `stopping`.
        """
        await self._resume()
        reader = await self._log.read(after=self._commit.cursor)
        while self._commit.step < self.config.total_steps:
            started = time.monotonic()
            if not await self._fill(reader):
                break
            await self._step(wait_s=time.monotonic() - started)
        await reader.close()
        if self._saved_step < self._commit.step:
            await self._save()
        if self._commit.step == self.config.total_steps:
            await self._announce_progress(finished=True)
        log.info("learner_ended", step=self._commit.step, of=self.config.total_steps)

    @property
    def policy(self) -> PolicyVersion:
        return PolicyVersion(version=self._commit.step, lineage=self._lineage)

    async def _resume(self) -> None:
        """Restore the newest checkpoint, open a new lineage if there was one before, and say where the run stands."""
        earlier = await self._state.get(Key.PROGRESS)
        checkpoint = self._checkpoints.newest()
        if isinstance(earlier, Progress):
            self._lineage = earlier.policy.lineage + 1
        if checkpoint is not None:
            state = checkpoint.state
            self._check_identity(state["identity"], checkpoint.path)
            await self._on_engine(self.engine.load, checkpoint.path)
            self._lineage = max(self._lineage, state["lineage"] + 1)
            self._commit = Commit(step=state["step"], cursor=state["cursor"], books=state["books"])
            self._collector = Collector(self.rules, Books.restore(state["books"]), state["cursor"])
            self._saved_step = self._commit.step
        self._journal.rewind(self._commit.step)
        log.info("learner_started", step=self._commit.step, lineage=self._lineage, resumed=checkpoint is not None)
        self.metrics.set("learner_lineage", self._lineage)
        if self._commit.step and self._phase() is Phase.RL:
            digest = await self._on_engine(self.engine.write_weights, self._weights.path_for(self.policy))
            await self._weights.announce(self.policy, digest)
        await self._announce_progress()

    def _check_identity(self, saved: dict[str, str], place: Path) -> None:
        if saved != self.identity:
            changed = ", ".join(
                f"{key}: {saved.get(key)} → {self.identity.get(key)}"
                for key in sorted(saved.keys() | self.identity.keys())
                if saved.get(key) != self.identity.get(key)
            )
            raise CheckpointError(
                f"{place} was made with another model or template ({changed}); give the run another run.name, "
                "or restore what was changed"
            )

    def _phase(self) -> Phase:
        return self.config.phase(self._commit.step)[0]

    async def _fill(self, reader: LogReader) -> bool:
        """Consume entries until the batch is full; return False when `stopping` came first."""
        standing = Standing(version=self._commit.step, phase=self._phase())
        wanted = self.config.groups_per_step(standing.phase)
        while len(self._collector.draft.admitted) < wanted:
            entry = await self._next_entry(reader)
            if self.stopping.is_set():
                return False
            if entry is None:
                missing = wanted - len(self._collector.draft.admitted)
                log.warning("groups_awaited", missing=missing, step=self._commit.step, quiet_s=QUIET_S)
                continue
            settled = self._collector.books.outcomes()
            self._collector.consume(entry, standing)
            if self._collector.books.outcomes() != settled:
                await self._announce_progress()
        return True

    async def _next_entry(self, reader: LogReader) -> Entry | None:
        async with asyncio.TaskGroup() as group:
            entry = group.create_task(reader.next(QUIET_S))
            stop = group.create_task(self.stopping.wait())
            await asyncio.wait({entry, stop}, return_when=asyncio.FIRST_COMPLETED)
            stop.cancel()
            if not entry.done():
                entry.cancel()
        return None if entry.cancelled() else entry.result()

    async def _step(self, wait_s: float) -> None:
        """Take one optimizer step on the draft and commit it: ledger, weights, progress, checkpoint."""
        started = time.monotonic()
        phase, _ = self.config.phase(self._commit.step)
        batch = self._collector.batch(self._commit.step)
        stats = await self._train(batch, phase)
        draft = self._collector.commit()
        self._commit = Commit(self._commit.step + 1, self._collector.cursor, self._collector.books.dump())
        file = self._weights.path_for(self.policy)
        digest = await self._on_engine(self.engine.write_weights, file)
        self._journal.write_ledger(self._ledger_line(draft, batch, digest))
        self._journal.write_episodes(self._commit.step, draft.consumed)
        publish_s = 0.0
        if self._phase() is Phase.RL:
            _, publish_s = await self._weights.announce(self.policy, digest)
        else:
            self._weights.tidy()
        weights_bytes = file.stat().st_size
        await self._announce_progress()
        if self._checkpoint_is_due(phase):
            await self._save()
        times = StepTimes(wait_s, time.monotonic() - started, publish_s, weights_bytes)
        await self._report(phase, draft, stats, times)

    async def _on_engine(self, call: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.engine_thread, partial(call, *arguments))

    async def _train(self, batch: Batch, phase: Phase) -> StepStats:
        section = self.config.imitation if phase is Phase.IMITATION else self.config.rl
        objective: Objective = "imitation" if phase is Phase.IMITATION else "rl"
        warmup = self.config.learner.warmup_steps
        lr = section.lr * min(1.0, (self._commit.step + 1) / warmup) if warmup else section.lr
        try:
            async with asyncio.timeout(self.config.learner.step_timeout_s):
                gap = await self._gap_of_engines(batch) if phase is Phase.RL else None
                stats = await self._on_engine(self.engine.train_step, batch, objective, lr)
                return stats if gap is None else replace(stats, logprob_gap_fresh=gap)
        except TimeoutError:
            raise RunFailed(
                f"step {self._commit.step + 1} took longer than learner.step_timeout_s = "
                f"{self.config.learner.step_timeout_s} s: a rank is stuck or the batch is too large; "
                "start the learner again to resume from the last checkpoint"
            ) from None

    async def _gap_of_engines(self, batch: Batch) -> float | None:
        """Compare actor and learner on one trace of the batch's newest version, where the step itself cannot."""
        newest = max(int(trace.versions_L.max()) for trace in batch.traces)
        weights = self._weights.find(newest)
        if newest == batch.version or weights is None:
            return None
        trace = max(batch.traces, key=lambda trace: int((trace.versions_L == newest).sum()))
        return await self._on_engine(self.engine.gap_at, trace, newest, weights)

    def _checkpoint_is_due(self, phase: Phase) -> bool:
        phase_ended = self._phase() is not phase or self._commit.step == self.config.total_steps
        return phase_ended or self._commit.step % self.config.learner.checkpoint_every == 0

    async def _save(self) -> None:
        """Write a checkpoint of the last commit, and free the log below what the oldest kept one needs."""
        started = time.monotonic()
        state = {
            "step": self._commit.step,
            "lineage": self._lineage,
            "cursor": self._commit.cursor,
            "books": self._commit.books,
            "identity": self.identity,
            "config": self.config.model_dump(mode="json"),
        }

        save = partial(self.engine.save, state=state)
        await self._on_engine(self._checkpoints.write, self._commit.step, save, state)
        self._saved_step = self._commit.step
        oldest = self._checkpoints.all()[-1]
        await self._log.purge_below(oldest.state["cursor"] + 1)
        stall_s = time.monotonic() - started
        self.metrics.observe("checkpoint_seconds", stall_s)
        log.info("checkpoint_written", step=self._commit.step, stall_s=round(stall_s, 2))

    async def _announce_progress(self, finished: bool = False) -> None:
        phase, phase_step = self.config.phase(self._commit.step)
        books = self._collector.books
        await self._state.put(
            Key.PROGRESS,
            Progress(
                step=self._commit.step,
                phase=phase,
                phase_step=phase_step,
                policy=self.policy,
                cursor=self._collector.cursor,
                outcomes=books.outcomes(),
                lowest_unsettled=books.lowest_unsettled(),
                finished=finished,
            ),
        )

    def _ledger_line(self, draft: Draft, batch: Batch, weights_digest: str) -> dict[str, Any]:
        return {
            "step": self._commit.step,
            "version": self.policy.version,
            "lineage": self.policy.lineage,
            "cursor": self._commit.cursor,
            "trained": [[sequence, group.ticket.ticket_id] for sequence, group in draft.admitted],
            "dropped": [[drop.sequence, drop.ticket_id, drop.reason.value] for drop in draft.dropped],
            "voids": draft.voids,
            "repeats": draft.repeats,
            "data_digest": digest_of(batch),
            "weights_digest": weights_digest,
        }

    async def _report(self, phase: Phase, draft: Draft, stats: StepStats, times: StepTimes) -> None:
        issued = {kind: await self._tickets.issued(kind) for kind in Kind}
        outcomes = self._collector.books.outcomes()
        line = metrics_line(phase, self.policy, draft, stats, times)
        line["tickets_issued"] = sum(issued.values())
        line["tickets_outstanding"] = sum(issued.values()) - sum(ends.settled for ends in outcomes.values())
        self._journal.write_metrics(line)
        mirror_metrics(self.metrics, line, draft)
        log.info("step_taken", **{key: line[key] for key in ("step", "phase", "success_rate", "reward_mean", "step_s")})


def digest_of(batch: Batch) -> str:
    """Return the xxh3_128 digest of everything in a batch that reaches the weights."""
    hasher = xxhash.xxh3_128()
    for trace in batch.traces:
        for array in (trace.ids_L, trace.mask_L, trace.logprobs_L, trace.versions_L, trace.advantages_L):
            hasher.update(array.tobytes())
    return hasher.hexdigest()
