"""The controller's wiring; it needs no torch."""

from functools import partial

from horizonrl.broker.connect import connected
from horizonrl.common.config import RunConfig
from horizonrl.common.service import Service, until_stopped
from horizonrl.envs import registry
from horizonrl.learner.controller import Controller
from horizonrl.learner.curriculum import Source, eval_tasks


async def run_controller(config: RunConfig, service: Service) -> None:
    """Run the controller until SIGTERM or the end of the run."""
    sources = [
        Source(env.id, tuple(spec.task_id for spec in registry.select(env.id, env.split, env.categories)), env.weight)
        for env in config.envs
    ]
    async with connected(config.run.name, config.broker) as transport:
        controller = Controller(config, transport, sources, service.metrics, eval_tasks(config))
        refresh = partial(service.metrics.mirror_broker, transport)
        async with service.open(config.metrics.host, config.metrics.port, refresh):
            service.ready = True
            await until_stopped(controller.run(), service.stopping)
