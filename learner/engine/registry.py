"""The learner's backends by name: where `learner.backend` finds its engine.

A backend is one module with a function that starts an engine from its settings. It is imported only when a run asks
for it, so a machine needs no package of the others. To add one, write its module in `backends/` and name it here: the
contract suite (`tests/contracts/test_engine.py`) runs every name.
"""

from collections.abc import Mapping

from horizonrl.common.config.training import LearnerSection
from horizonrl.common.errors import ConfigError
from horizonrl.common.imports import uncollected
from horizonrl.common.plugins import definition, load_choice, require_choice
from horizonrl.learner.engine.api import EngineSettings, RankEngine

BACKENDS: Mapping[str, str] = {
    "deepspeed": "horizonrl.learner.engine.backends.deepspeed:start_engine",
    "torch": "horizonrl.learner.engine.backends.torch_adamw:start_engine",
    "hash": "horizonrl.learner.engine.backends.hash:start_engine",
}

SEVERAL_RANKS = frozenset({"deepspeed"})
"""Those that can be spread over several ranks. The others run in one process."""


def require_backend(learner: LearnerSection) -> None:
    """Raise ConfigError unless the backend exists and takes the section's number of ranks."""
    require_choice("learner.backend", learner.backend, BACKENDS, "settings")
    if learner.ranks * learner.nodes > 1 and learner.backend not in SEVERAL_RANKS:
        raise ConfigError(
            f"learner.ranks is {learner.ranks} and learner.nodes {learner.nodes}, but learner.backend is "
            f"{learner.backend}, which runs in one process: set both to 1, or backend to "
            f"{' or '.join(sorted(SEVERAL_RANKS))}"
        )


def make_engine(settings: EngineSettings) -> RankEngine:
    """Start this rank's engine on the backend that the settings name.

    Raises ConfigError for an unknown name, MissingDependency if a package of the backend is not installed.
    """
    with uncollected("torch"):
        start = load_choice("learner.backend", settings.backend, BACKENDS, "settings")
    engine = start(settings)
    if not callable(getattr(engine, "train_step", None)):
        raise ConfigError(
            f"learner.backend {settings.backend} returned {engine!r:.100}: return an engine "
            f"({definition(start)})"
        )
    return engine  # type: ignore[no-any-return]
