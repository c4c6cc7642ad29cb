"""The controller's wiring; it needs no torch."""

from horizonrl.broker.connect import connected
from horizonrl.common.config.schema import RunConfig
from horizonrl.common.service import Service, until_stopped
from horizonrl.learner.controller.curriculum import eval_tasks, sources_of
from horizonrl.learner.controller.loop import Controller


async def run_controller(config: RunConfig, service: Service) -> None:
    """Run the controller until SIGTERM or the end of the run."""
    sources = sources_of(config.envs, demonstrations=config.demos_due(1) > 0, states=config.advantage.compares_states)
    async with connected(config.run.name, config.broker) as transport:
        controller = Controller(config, transport, sources, service.metrics, eval_tasks(config))
        async with service.open(config.metrics.host, config.metrics.port, transport):
            service.ready = True
            await until_stopped(controller.run(), service.stopping)
            await service.last_reading()
