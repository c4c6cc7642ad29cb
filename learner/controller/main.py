"""The controller's wiring; it needs no torch."""

from collections.abc import Sequence

from horizonrl.broker.api import Transport
from horizonrl.broker.connect import connected
from horizonrl.broker.signing import TicketSigner
from horizonrl.common.config.schema import RunConfig
from horizonrl.common.metrics import Metrics
from horizonrl.common.service import Service, until_stopped
from horizonrl.learner.controller.curriculum import (
    Curriculum,
    EvalTask,
    TaskSource,
    eval_tasks,
    sources_of,
)
from horizonrl.learner.controller.loop import Controller


async def run_controller(config: RunConfig, service: Service) -> None:
    """Run the controller until SIGTERM or the end of the run."""
    sources = sources_of(
        config.envs, demonstrations=config.demos_due(1) > 0, states=config.advantage.compares_states
    )
    async with connected(config.run.name, config.broker) as transport:
        controller = build_controller(
            config, transport, sources, service.metrics, eval_tasks(config)
        )
        async with service.open(config.metrics.host, config.metrics.port, transport):
            service.ready = True
            await until_stopped(controller.run(), service.stopping)
            await service.last_reading()


def build_controller(
    config: RunConfig,
    transport: Transport,
    sources: Sequence[TaskSource],
    metrics: Metrics | None = None,
    planned: Sequence[EvalTask] = (),
) -> Controller:
    """Return a controller; `planned` are the tasks of every evaluation round, in order."""
    signer = TicketSigner.load(config.run.name, config.broker.ticket_key)
    return Controller(
        schedule=config,
        settings=config.settings.model_copy(update={"ticket_key": signer.fingerprint}),
        transport=transport,
        signer=signer,
        curriculum=Curriculum(
            config.run.seed, sources, adaptive=config.curriculum.kind == "adaptive"
        ),
        metrics=metrics or Metrics(),
        eval_tasks=planned,
    )
