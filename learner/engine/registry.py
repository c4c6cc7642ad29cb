"""The learner's backends by name: where `learner.backend` finds its engine.

A backend is one module with a function that starts an engine from its settings. It is imported only when a run asks
for it, so a machine needs no package of the others. To add one, write its module, name it here and in the config's
key, and add it to the list in `tests/contracts/test_engine.py`.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import cast

from horizonrl.common.errors import ConfigError, did_you_mean
from horizonrl.learner.engine.api import EngineSettings, RankEngine

BACKENDS: Mapping[str, str] = {
    "deepspeed": "horizonrl.learner.engine.deepspeed:start_engine",
    "torch": "horizonrl.learner.engine.torch_adamw:start_engine",
    "hash": "horizonrl.learner.engine.hash:start_engine",
}


def make_engine(settings: EngineSettings) -> RankEngine:
    """Start this rank's engine on the backend that the settings name.

    Raises ConfigError for an unknown name, MissingDependency if a package of the backend is not installed.
    """
    if settings.backend not in BACKENDS:
        raise ConfigError(
            f"learner.backend is {settings.backend!r}: choose {', '.join(BACKENDS)}"
            f"{did_you_mean(settings.backend, BACKENDS)}"
        )
    module, _, function = BACKENDS[settings.backend].partition(":")
    start = cast(Callable[[EngineSettings], RankEngine], getattr(import_module(module), function))
    return start(settings)
