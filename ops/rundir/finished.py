"""Whether a run is over, which a role asks before it loads anything: started again in a finished run, it ends at once.

A platform starts a program again when it has ended. Without this look, each start would load the model, take a GPU,
open a lineage and publish all weights, only to find that nothing is left to train.
"""

import asyncio
from pathlib import Path

from horizonrl.broker.api import Key, Role
from horizonrl.broker.connect import connected
from horizonrl.broker.state import StateStore
from horizonrl.common.config.schema import RunConfig
from horizonrl.common.errors import RunUnknown
from horizonrl.common.run_dir import CHECKPOINTS
from horizonrl.common.state import Progress, WeightsManifest, end_of_run
from horizonrl.learner.records.checkpoint import Checkpoint, CheckpointStore


def finished_step(config: RunConfig, role: Role) -> int | None:
    """Return the step at which the run ended, or None if there is something left to do for `role`.

    Raises what `connect` raises: a role without its broker could not work either.
    """
    # On asyncio's own loop, whose threads end with it: vLLM's engine is forked only while the process has one thread,
    # and uvloop keeps those that looked up the broker's name.
    step = asyncio.run(ended_at(config, role))
    if step is not None and role is Role.LEARNER:
        newest = newest_checkpoint(config.run_dir)
        # Another directory, or an older copy of this one: the learner says which, or trains what is missing.
        return step if newest is not None and newest.step >= step else None
    return step


async def ended_at(config: RunConfig, role: Role) -> int | None:
    """Return the step at which the learner has ended the run, if the config has no more steps; else None."""
    try:
        async with connected(config.run.name, config.broker, role, existing=True) as transport:
            state = StateStore(transport)
            progress, weights = [await state.get(key) for key in (Key.PROGRESS, Key.POLICY)]
    except RunUnknown:  # a run that has yet to begin
        return None
    if not isinstance(progress, Progress) or not isinstance(weights, WeightsManifest):
        return None
    # Both, since they are set one after the other: a learner that died between the two has to set the second.
    return end_of_run(config.total_steps, progress, weights)


def newest_checkpoint(run_dir: Path) -> Checkpoint | None:
    """Return the newest checkpoint of a run directory, which need not exist and is not made."""
    folder = run_dir / CHECKPOINTS
    return CheckpointStore(folder, keep=1).newest() if folder.is_dir() else None


def how_to_go_on(config: RunConfig, step: int) -> str:
    return (
        f"run {config.run.name} is finished at step {step}: to go on, start all of its roles with a higher --rl.steps "
        f"(now {config.rl.steps}); to begin anew, choose another --run.name"
    )
