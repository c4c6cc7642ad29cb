"""Whether a role's recipe is the run's: the controller publishes what the roles must agree on under the key `run`."""

import asyncio

from horizonrl.broker.api import Key, Transport
from horizonrl.broker.state import StateStore
from horizonrl.common.config.changes import config_changes
from horizonrl.common.errors import ConfigError, RunFailed
from horizonrl.common.logs import get_logger
from horizonrl.common.state import RunSettings

log = get_logger()

AGREEMENT_WAIT_S = 120.0
"""A controller that was started together with this role, on a changed recipe, has published it within this time."""
OF_LEARNER = ("ticket_key", "recipe")
"""What the learner alone must agree on with the controller. Actors have no ticket key."""


async def wait_for_agreement(
    transport: Transport, mine: RunSettings, wait_s: float = AGREEMENT_WAIT_S
) -> None:
    """Return once the key `run` holds what this actor's recipe says; wait for a controller that has yet to start.

    Raises ConfigError if it still differs after `wait_s`: what this actor played would belong to another run.
    """
    await _watch(transport, mine, wait_s, role="actor", once=True)


async def stays_agreed(
    transport: Transport, mine: RunSettings, wait_s: float = AGREEMENT_WAIT_S
) -> None:
    """Compare this learner's recipe with that of every controller that starts, until cancelled.

    Raises ConfigError if they differ for `wait_s`: groups of another recipe's tickets would be trained; with another
    ticket key none would be, and without one forged ones.
    """
    await _watch(transport, mine, wait_s, role="learner", once=False)


async def _watch(
    transport: Transport, mine: RunSettings, wait_s: float, role: str, once: bool
) -> None:
    differing = ""
    try:
        # No deadline until a recipe differs: a role may be started long before its controller.
        async with asyncio.timeout(None) as patience:
            async for published in StateStore(transport).watch(Key.RUN):
                if not isinstance(published, RunSettings):
                    continue
                differing = differences(mine, published, () if role == "learner" else OF_LEARNER)
                if not differing and once:
                    return
                if not differing:
                    patience.reschedule(None)
                # One deadline for all differences: another wrong recipe must not postpone it.
                elif patience.when() is None:
                    log.warning("recipe_differs", differences=differing, wait_s=wait_s)
                    patience.reschedule(asyncio.get_running_loop().time() + wait_s)
    except TimeoutError:
        raise ConfigError(
            f"this {role}'s recipe is not the run's: {differing}. Start it with the recipe that the controller was "
            "started with, or start the controller again with this one"
        ) from None
    raise RunFailed("the broker stopped sending the run's settings; start this role again")


def differences(mine: RunSettings, published: RunSettings, apart: tuple[str, ...] = ()) -> str:
    """Return what two recipes disagree on, with both values; empty if they agree. Fields in `apart` do not count."""
    changed = config_changes(_by_name(mine, apart), _by_name(published, apart), "absent")
    return "; ".join(
        f"{name} is {here!s:.300} here and {there!s:.300} in the run"
        for name, (here, there) in changed.items()
    )


def _by_name(settings: RunSettings, apart: tuple[str, ...]) -> dict[str, object]:
    """Flatten the settings, so that a difference in one option of one environment is named as such."""
    flat: dict[str, object] = {
        name: value for name, value in settings if name not in (*apart, *OF_LEARNER, "environments")
    }
    flat |= {
        f"{env.env_id}.{name}": value
        for env in settings.environments
        for name, value in env
        if name != "env_id"
    }
    if "recipe" not in apart:
        flat |= settings.recipe
    if "ticket_key" not in apart:
        flat["broker.ticket_key"] = settings.ticket_key or "not set"
    return flat
