"""Whether an actor's recipe is the run's: the controller publishes what actors must agree on under the key `run`."""

import asyncio

from horizonrl.broker.api import Key, Transport
from horizonrl.broker.state import StateStore
from horizonrl.common.errors import ConfigError, RunFailed
from horizonrl.common.logs import get_logger
from horizonrl.common.state import RunSettings

log = get_logger()

AGREEMENT_WAIT_S = 120.0
"""A controller that was started together with this actor, on a changed recipe, has published it within this time."""


async def agreed(transport: Transport, mine: RunSettings, wait_s: float = AGREEMENT_WAIT_S) -> None:
    """Return once the key `run` holds what this actor's recipe says; wait for a controller that has yet to start.

    Raises ConfigError if it still differs after `wait_s`: what this actor played would belong to another run.
    """
    differing = ""
    try:
        # No deadline until a recipe differs: an actor may be started long before its controller.
        async with asyncio.timeout(None) as patience:
            async for published in StateStore(transport).watch(Key.RUN):
                if not isinstance(published, RunSettings) or not (differing := differences(mine, published)):
                    return
                # One deadline for all differences: another wrong recipe must not postpone it.
                if patience.when() is None:
                    log.warning("recipe_differs", differences=differing, wait_s=wait_s)
                    patience.reschedule(asyncio.get_running_loop().time() + wait_s)
    except TimeoutError:
        raise ConfigError(
            f"this actor's recipe is not the run's: {differing}. Start it with the recipe that the controller was "
            "started with, or start the controller again with this one"
        ) from None
    raise RunFailed("the broker stopped sending the run's settings; start this role again")


def differences(mine: RunSettings, published: RunSettings) -> str:
    """Return what two recipes disagree on, with both values; empty if they agree."""
    here, there = _by_name(mine), _by_name(published)
    return "; ".join(
        f"{name} is {here.get(name, 'absent')!s:.300} here and {there.get(name, 'absent')!s:.300} in the run"
        # Names of both sides: an option that only one recipe has is a difference too.
        for name in here | there
        if here.get(name, "absent") != there.get(name, "absent")
    )


def _by_name(settings: RunSettings) -> dict[str, object]:
    """Flatten the settings, so that a difference in one option of one environment is named as such."""
    run_wide = {name: value for name, value in settings if name != "environments"}
    per_environment = {
        f"{env.env_id}.{name}": value for env in settings.environments for name, value in env if name != "env_id"
    }
    return run_wide | per_environment
