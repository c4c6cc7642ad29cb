"""HorizonRL: asynchronous reinforcement learning for LLM agents on long, multi-turn tasks.

The names below are the public Python API (docs/python-api.md). Each is imported when it is first used (PEP 562), so
that `import horizonrl` takes no time and no memory. The repository's root is this package: its rooms are the
subpackages.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from horizonrl.common.config.schema import RunConfig
    from horizonrl.common.errors import ConfigError, HorizonError, MissingDependency, RunFailed
    from horizonrl.ops.api.configs import load_recipe
    from horizonrl.ops.api.evaluation import Evaluation, evaluate, open_evaluation
    from horizonrl.ops.api.live import LiveRun, start, train
    from horizonrl.ops.api.programs import RunningCommand, start_role
    from horizonrl.ops.api.rows import Rows
    from horizonrl.ops.api.run import Run, RunEvent, open_run
    from horizonrl.ops.evaluation.plan import Choice
    from horizonrl.ops.publish.rows import EpisodeRow, TurnRow

__all__ = [
    "Choice",
    "ConfigError",
    "EpisodeRow",
    "Evaluation",
    "HorizonError",
    "LiveRun",
    "MissingDependency",
    "Rows",
    "Run",
    "RunConfig",
    "RunEvent",
    "RunFailed",
    "RunningCommand",
    "TurnRow",
    "evaluate",
    "load_recipe",
    "open_evaluation",
    "open_run",
    "start",
    "start_role",
    "train",
]
_PLACES = {
    "common.config.schema": ("RunConfig",),
    "common.errors": ("ConfigError", "HorizonError", "MissingDependency", "RunFailed"),
    "ops.api.configs": ("load_recipe",),
    "ops.api.evaluation": ("Evaluation", "evaluate", "open_evaluation"),
    "ops.api.live": ("LiveRun", "start", "train"),
    "ops.api.programs": ("RunningCommand", "start_role"),
    "ops.api.rows": ("Rows",),
    "ops.api.run": ("Run", "RunEvent", "open_run"),
    "ops.evaluation.plan": ("Choice",),
    "ops.publish.rows": ("EpisodeRow", "TurnRow"),
}
"""The module of each name."""


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("horizonrl")
    for module, names in _PLACES.items():
        if name in names:
            # Kept, so that the next use is an ordinary attribute.
            value = globals()[name] = getattr(import_module(f"horizonrl.{module}"), name)
            return value
    raise AttributeError(f"module 'horizonrl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
