"""The controller's fence: one controller issues a run's tickets, and one that has been replaced ends.

Place in the flow: before each **Ticket**. The controller that set the key `run` last is the run's controller. Tickets
are stored without a condition that the broker could check, so they are preceded by a look at the key's revision, as a
learner's purges are (ADR 10).
"""

import asyncio

from horizonrl.broker.api import Key, Transport
from horizonrl.broker.state import StateStore
from horizonrl.common.errors import Fenced, StateConflict
from horizonrl.common.logs import get_logger
from horizonrl.common.state import RunSettings

log = get_logger()


class ControllerFence:
    def __init__(self, transport: Transport, settings: RunSettings) -> None:
        self._transport = transport
        self._state = StateStore(transport)
        self._settings = settings
        self._revision = 0
        """Revision of the key `run` as this controller last set it."""
        # Issuing and auditing both look: one of them must not take what the other sets for a successor's.
        self._looking = asyncio.Lock()

    async def take_over(self) -> None:
        """Set the key `run`: from here on, a controller that began earlier is fenced."""
        self._revision = await self._state.put(Key.RUN, self._settings)

    async def check(self) -> None:
        """Raise Fenced if another controller has taken the run over; set the key again if the broker has lost it."""
        async with self._looking:
            while (revision := await self._transport.revision(Key.RUN)) != self._revision:
                # A key that was deleted or defaced has a new revision and no record: no controller has set it.
                if revision > self._revision and await self._state.get(Key.RUN) is not None:
                    raise Fenced(
                        "another controller issues this run's tickets: end one of the two, or give this run another "
                        "run.name. This controller ends now; do not start it again while the other one runs"
                    )
                try:
                    self._revision = await self._state.put(Key.RUN, self._settings, revision)
                except StateConflict:
                    continue  # set at the same time: look whose it is
                log.warning("run_settings_restored", revision=self._revision)
