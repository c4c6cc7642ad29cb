"""The recorder: writes down what each step and each evaluation came to.

Place in the flow: **Version** and **result** → run directory, Prometheus and log. The journal's files come first: they
are what `horizonrl status`, the report and `horizonrl replay` read.
"""

from horizonrl.common.logs import get_logger
from horizonrl.common.metrics import Metrics
from horizonrl.common.types import Phase, PolicyVersion
from horizonrl.learner.engine.api import StepStats
from horizonrl.learner.intake.batch import Batch
from horizonrl.learner.intake.collector import EvalEnd, PendingBatch
from horizonrl.learner.records.best import Best
from horizonrl.learner.records.evaluation import count_end, evaluation_line, mirror_evaluation
from horizonrl.learner.records.journal import Journal
from horizonrl.learner.records.report import StepTimes, ledger_line, metrics_line, mirror_metrics
from horizonrl.learner.state import LearnerState
from horizonrl.learner.weights import WeightsPublisher

log = get_logger()


class Recorder:
    def __init__(
        self, state: LearnerState, journal: Journal, best: Best, weights: WeightsPublisher, metrics: Metrics
    ) -> None:
        self._state = state
        self._journal = journal
        self._best = best
        self._weights = weights
        self._metrics = metrics

    def record_commit(self, pending: PendingBatch, batch: Batch, weights_digest: str) -> None:
        """Write a committed step's ledger line and its episodes, before anyone is told of the step."""
        state = self._state
        line = ledger_line(state.policy, state.last_commit.cursor, pending, batch.digest(), weights_digest)
        self._journal.write_ledger(line)
        self._journal.write_episodes(state.step, pending.consumed)
        self._journal.free_episodes(state.config.learner.keep_episodes_bytes)

    def record_step(
        self, phase: Phase, pending: PendingBatch, stats: StepStats, times: StepTimes, tickets_issued: int
    ) -> None:
        """Write the line of `metrics.jsonl` of a committed step, and mirror it."""
        state = self._state
        settled = sum(outcomes.settled for outcomes in state.collector.accounts.outcomes().values())
        rl_step = state.step - state.config.imitation.steps
        # The state keeps each environment's last growth, which may be many steps old.
        grown = [growth for growth in state.horizons.growths() if growth.phase_step == rl_step]
        line = metrics_line(phase, state.policy, pending, stats, times)
        line |= {"tickets_issued": tickets_issued, "tickets_outstanding": tickets_issued - settled}
        line["growths"] = [growth.model_dump() for growth in grown]
        self._journal.write_metrics(line)
        mirror_metrics(self._metrics, line, pending)
        for growth in grown:
            self._metrics.count("horizon_growths_total", env=growth.env_id)
            log.info("horizon_grown", **growth.model_dump())
        log.info("step_taken", **{key: line[key] for key in ("step", "phase", "success_rate", "reward_mean", "step_s")})

    def record_evaluated(self, end: EvalEnd) -> None:
        """Take the end of an eval ticket; if it completes its round, write the result and keep the best version."""
        state = self._state
        count_end(self._metrics, end)
        if end.group is not None:
            self._journal.write_held_out(state.step + 1, end.group)
        results = state.rounds.add(end)
        if results is None:
            return
        # The step that is in the making: the round is rolled back together with it, and written again.
        line = evaluation_line(results, state.config, state.policy, settled_step=state.step + 1)
        self._journal.write_evaluation(line)
        mirror_evaluation(self._metrics, line)
        judged = PolicyVersion(version=line["version"], lineage=line["lineage"])
        best = self._best.offer(line, self._weights.find(judged))
        log.info("evaluated", best=best, **{key: line[key] for key in ("version", "success_rate", "low", "high")})
