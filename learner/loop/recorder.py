"""The recorder: writes down what each step and each evaluation came to.

Place in the flow: **Version** and **result** → run directory, Prometheus and log. The journal's files come first: they
are what `horizonrl status`, the report and `horizonrl history replay` read.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

from horizonrl.common.logs import get_logger
from horizonrl.common.types import Phase, PolicyVersion
from horizonrl.learner.intake.collector import EvalEnd, PendingBatch
from horizonrl.learner.loop.ports import Ports
from horizonrl.learner.loop.state import LearnerState
from horizonrl.learner.loop.weights_publisher import WeightsPublisher
from horizonrl.learner.records.best import Best
from horizonrl.learner.records.evaluation import count_end, evaluation_line, mirror_evaluation
from horizonrl.learner.records.report import (
    StepTimes,
    TakenStep,
    drawn_from,
    ledger_line,
    metrics_line,
    mirror_metrics,
)

log = get_logger()

CONTEXT_SHARE = 0.25
"""Of a step's valid episodes of an environment. Beyond it the context is the horizon, whatever the config says."""

BEYOND_SHARE = 0.5
"""Of an environment's demonstrations. Beyond it the horizon ends most episodes before their task can be solved."""


class Recorder:
    def __init__(
        self,
        ports: Ports,
        state: LearnerState,
        best: Best,
        weights: WeightsPublisher,
        keep_episodes_bytes: int,
    ) -> None:
        self._ports = ports
        self._state = state
        self._best = best
        self._weights = weights
        self._keep_episodes_bytes = keep_episodes_bytes
        self._writing: asyncio.Task[None] | None = None
        """The episodes of the last step that are being written."""
        self._context_is_short: set[str] = set()
        """Environments of which the log has said so."""
        self._expert_turns: defaultdict[str, Counter[int]] = defaultdict(Counter)
        """How many demonstrations of an environment have how many turns, until RL begins there."""

    async def record_commit(
        self, background: asyncio.TaskGroup, step: TakenStep, weights_digest: str
    ) -> None:
        """Write a committed step's ledger line, before anyone is told of the step; begin to write its episodes."""
        # In threads, here and below: an fsync may take a second, and the episodes of a large step take minutes.
        data_digest = await asyncio.to_thread(step.batch.digest)
        line = ledger_line(step.policy, step.cursor, step.pending, data_digest, weights_digest)
        await asyncio.to_thread(self._ports.journal.write_ledger, line)
        # One step at a time, so that what waits to be written is bounded.
        await self.written()
        self._writing = background.create_task(
            self._write_episodes(step.policy.version, step.pending)
        )

    async def written(self) -> None:
        """Wait until the episodes of every step in the ledger are in their files."""
        if self._writing is not None:
            # Shielded: whoever stops waiting does not stop the writing.
            await asyncio.shield(self._writing)

    async def _write_episodes(self, step: int, pending: PendingBatch) -> None:
        await asyncio.to_thread(self._ports.journal.write_episodes, step, pending.consumed)
        await asyncio.to_thread(self._ports.journal.free_episodes, self._keep_episodes_bytes)

    async def record_step(self, step: TakenStep, times: StepTimes) -> None:
        """Write the line of `metrics.jsonl` of the last committed step, and mirror it."""
        state, phase, pending = self._state, step.phase, step.pending
        rl_step = state.step - state.schedule.imitation.steps
        # The state keeps each environment's last growth, which may be many steps old.
        grown = [growth for growth in state.horizons.growths() if growth.phase_step == rl_step]
        drawn = drawn_from(state.curriculum.explained(state.yields.all(), state.yields.repeats()))
        line = await asyncio.to_thread(metrics_line, phase, step.policy, pending, step.stats, times)
        line |= {
            "tickets_issued": step.tickets_issued,
            "tickets_outstanding": step.tickets_outstanding,
        }
        line |= {"growths": [growth.model_dump() for growth in grown], "curriculum": drawn}
        await asyncio.to_thread(self._ports.journal.write_metrics, line)
        mirror_metrics(self._ports.metrics, line, pending)
        self._warn_of_context(phase, line["environments"])
        self._warn_of_horizon(phase, pending, line["horizons"])
        for growth in grown:
            self._ports.metrics.count("horizon_growths_total", env=growth.env_id)
            log.info("horizon_grown", **growth.model_dump())
        log.info(
            "step_taken",
            **{
                key: line[key] for key in ("step", "phase", "success_rate", "reward_mean", "step_s")
            },
        )

    def _warn_of_context(self, phase: Phase, environments: Mapping[str, Mapping[str, Any]]) -> None:
        for env, outcome in environments.items():
            share = outcome["context_share"] or 0.0
            if phase is Phase.RL and share > CONTEXT_SHARE and env not in self._context_is_short:
                self._context_is_short.add(env)
                limit = self._state.rules.max_context_tokens
                log.warning(
                    "context_before_horizon", env=env, share=share, max_context_tokens=limit
                )

    def _warn_of_horizon(
        self, phase: Phase, pending: PendingBatch, horizons: Mapping[str, int]
    ) -> None:
        """Say once if experts need more turns than RL begins with: it then teaches how to lose a task slowly."""
        if phase is Phase.IMITATION:
            for group in pending.consumed:
                turns = self._expert_turns[group.ticket.task.env_id]
                turns.update(len(episode.turns) for episode in group.valid_episodes)
            return
        for env, horizon in horizons.items():
            turns = self._expert_turns.pop(env, Counter())
            share = sum(count for needed, count in turns.items() if needed > horizon) / max(
                1, turns.total()
            )
            if share > BEYOND_SHARE:
                log.warning("horizon_below_experts", env=env, horizon=horizon, share=share)

    async def record_evaluated(self, end: EvalEnd) -> None:
        """Take the end of an eval ticket; if it completes its round, write the result and keep the best version."""
        state = self._state
        count_end(self._ports.metrics, end)
        if end.group is not None:
            await asyncio.to_thread(self._ports.journal.write_held_out, state.step + 1, end.group)
        results = state.rounds.add(end)
        if results is None:
            return
        # The step that is in the making: the round is rolled back together with it, and written again.
        line = evaluation_line(results, state.schedule, state.policy, settled_step=state.step + 1)
        await asyncio.to_thread(self._ports.journal.write_evaluation, line)
        mirror_evaluation(self._ports.metrics, line)
        judged = PolicyVersion(version=line["version"], lineage=line["lineage"])
        with self._weights.reading(judged) as weights:
            best = await asyncio.to_thread(self._best.offer, line, weights)
        log.info(
            "evaluated",
            best=best,
            **{key: line[key] for key in ("version", "success_rate", "low", "high")},
        )
