"""The controller's wiring; it needs no torch."""

from collections.abc import Iterable

from horizonrl.broker.connect import connected
from horizonrl.common.config.schema import EnvSection, RunConfig
from horizonrl.common.errors import ConfigError
from horizonrl.common.service import Service, until_stopped
from horizonrl.common.types import Kind
from horizonrl.envs import registry
from horizonrl.learner.controller.curriculum import TaskSource, eval_tasks
from horizonrl.learner.controller.loop import Controller


async def run_controller(config: RunConfig, service: Service) -> None:
    """Run the controller until SIGTERM or the end of the run."""
    sources = sources_of(config.envs, demonstrations=config.demos_due(1) > 0)
    async with connected(config.run.name, config.broker) as transport:
        controller = Controller(config, transport, sources, service.metrics, eval_tasks(config))
        async with service.open(config.metrics.host, config.metrics.port, transport):
            service.ready = True
            await until_stopped(controller.run(), service.stopping)


def sources_of(envs: Iterable[EnvSection], *, demonstrations: bool = False) -> list[TaskSource]:
    """List the tasks of each environment. Raises ConfigError where it has none, or cannot do what it is drawn for.

    `demonstrations` says that the run wants some.
    """
    sources = []
    for env in envs:
        if registry.demonstrations_only(env.id) and {*env.kinds} != {Kind.DEMO}:
            raise ConfigError(
                f"{env.id} only has demonstrations, and its kinds are {', '.join(env.kinds)}: give it "
                'kinds = ["demo"], and for the other kinds an environment that can be played'
            )
        if demonstrations and Kind.DEMO in env.kinds and not registry.has_expert(env.id):
            raise ConfigError(
                f"{env.id} has no expert that could demonstrate its tasks: give it kinds = "
                '["train", "eval"], or set imitation.steps and rl.demos_per_step to 0'
            )
        specs = registry.select(env.id, env.split, env.categories, env.options)
        sources.append(TaskSource(env.id, tuple(spec.task_id for spec in specs), env.weight, env.kinds))
    return sources
