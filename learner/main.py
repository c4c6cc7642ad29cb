"""The learner's wiring: ranks, engine, broker, loop."""

from pathlib import Path

from horizonrl.broker.api import Role
from horizonrl.broker.connect import connected
from horizonrl.broker.weights.changes import warm_up_in_thread
from horizonrl.common.config.schema import RunConfig
from horizonrl.common.service import Service
from horizonrl.learner.controller.curriculum import eval_tasks
from horizonrl.learner.engine.thread import EngineThread
from horizonrl.learner.intake.collector import Rules
from horizonrl.learner.loop.loop import LearnerLoop
from horizonrl.learner.ranks.launch import on_ranks
from horizonrl.learner.records.journal import only_learner


async def run_learner(config: RunConfig, model_dir: Path, identity: dict[str, str], service: Service) -> None:
    """Run one rank of the learner until SIGTERM or the last step. Rank 0 leads; the others follow its calls."""

    async def learn(engine: EngineThread, rules: Rules) -> None:
        # Before the broker is asked: a second learner on this machine ends without having displaced the first one.
        with only_learner(config.run_dir):
            async with (
                connected(config.run.name, config.broker, Role.LEARNER) as transport,
                service.open(config.metrics.host, config.metrics.port, transport),
            ):
                loop = LearnerLoop(
                    config=config,
                    transport=transport,
                    engine=engine,
                    rules=rules.of_model(identity),
                    model_identity=identity,
                    stopping=service.stopping,
                    metrics=service.metrics,
                    eval_tasks=eval_tasks(config),
                )
                service.ready = True
                if not config.broker.shared_files:  # the first groups are being sampled meanwhile
                    warm_up_in_thread()
                await loop.run()
                await service.last_reading()

    await on_ranks(config, model_dir, learn)
