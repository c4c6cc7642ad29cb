"""The names in a config that a start refuses: `horizonrl config` and `horizonrl train` ask here, for the same words."""

from contextlib import suppress

from horizonrl.actors.engines.registry import require_engine
from horizonrl.common.config.schema import RunConfig
from horizonrl.common.errors import MissingDependency
from horizonrl.envs import registry
from horizonrl.learner.algorithm.own import require_functions
from horizonrl.learner.engine.registry import require_backend


def require_names(config: RunConfig) -> None:
    """Raise ConfigError for an engine, a backend, a function, an environment or its option that is not there."""
    require_engine(config.actor.engine)
    require_backend(config.learner)
    require_functions(config.objective)
    for env in config.envs:
        # What is not installed here may be installed where the run starts.
        with suppress(MissingDependency):
            registry.require_options(env.id, env.options)
