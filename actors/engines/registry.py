"""The inference engines by name. An engine is imported when it is started: none needs what another one needs.

To add one, write a file with `async def start(settings: InferenceSettings) -> Policy`, name it here, and add it to the
fixtures of `tests/contracts/test_policy.py`. An engine of another package needs no entry: name it `module:function`.
"""

from collections.abc import Awaitable, Callable
from pathlib import Path

from horizonrl.actors.engines.drained import DrainedPolicy
from horizonrl.actors.policy import InferenceSettings, Policy
from horizonrl.common.config.schema import LARGEST_SHARED, ActorSection
from horizonrl.common.config.training import ModelSection
from horizonrl.common.plugins import load_choice, require_choice

# Names and not classes: importing an engine takes seconds, and needs packages that the others do without.
ENGINES = {
    "vllm": "horizonrl.actors.engines.vllm:start",
    "scripted": "horizonrl.actors.engines.scripted:start",
}


async def start_policy(
    actor: ActorSection, model: ModelSection, model_dir: Path, *, seed: int, renewed: bool = True
) -> Policy:
    """Start the engine that `actor` names; return once it can generate. `renewed`: whether new weights will come.

    Raises ConfigError for an unknown name, MissingDependency for an engine that is not installed, EngineDead for one
    that does not start.
    """
    start = factory(actor.engine)
    share = actor.memory_share(shared=False)  # where it is shared, `train` names the share
    policy = await start(
        InferenceSettings(
            model_dir=model_dir,
            max_context_tokens=model.max_context_tokens,
            slots=actor.slots,
            threads=actor.threads,
            kv_cache_mib=actor.kv_cache_mib,
            gpu_memory_share=share,
            shares_gpu=share <= LARGEST_SHARED,
            tensor_parallel=actor.tensor_parallel,
            renewed=renewed,
            vllm=actor.vllm,
            seed=seed,
        )
    )
    return DrainedPolicy(policy) if actor.weights == "drained" else policy


def require_engine(name: str) -> None:
    """Raise ConfigError unless there is an engine of this name."""
    require_choice("actor.engine", name, ENGINES, "settings")


def factory(name: str) -> Callable[[InferenceSettings], Awaitable[Policy]]:
    """Import an engine's module and return what starts it. Raises ConfigError if there is none."""
    return load_choice("actor.engine", name, ENGINES, "settings")
