"""The announcer: tells the run where the learner stands, and the actors which weights to sample with.

Place in the flow: **Version** → everyone. Everything goes through the fence: a learner that has been replaced raises
Fenced here, before it changes anything.
"""

import asyncio

from horizonrl.common.logs import get_logger
from horizonrl.common.types import PolicyVersion
from horizonrl.learner.loop.ports import Ports
from horizonrl.learner.loop.state import LearnerState
from horizonrl.learner.loop.weights_publisher import WeightsPublisher

log = get_logger()


class Announcer:
    def __init__(self, ports: Ports, state: LearnerState, weights: WeightsPublisher) -> None:
        self._ports = ports
        self._state = state
        self._weights = weights
        self._step: int | None = None
        """The step that this learner announced last."""
        # A version may be on its way while a key frame is asked for: both extend one chain of changes.
        self._sending = asyncio.Lock()

    async def announce_consumed(self) -> None:
        """Set the key `progress` again, unless its step has changed: that is told with the step's version.

        Otherwise the controller would issue tickets of a version whose weights are still on their way.
        """
        if self._step == self._state.step:
            await self.announce_progress()

    async def announce_progress(self) -> None:
        """Set the key `progress`."""
        self._step = self._state.step
        await self._ports.fence.announce(self._state.progress())

    async def announce_end(self) -> None:
        """Tell controller and actors that the run is over."""
        await self._ports.fence.announce(self._state.progress(finished=True))
        await self._weights.announce_end(self._state.step)

    async def announce_version(self, weights_digest: str) -> None:
        """Announce a committed step: to the actors if its version is one that they get, to the controller always."""
        if self._state.schedule.publishes(self._state.step):
            # Before progress: the controller answers progress with tickets of this version, and an actor waits for its
            # weights.
            await self.announce_weights(weights_digest)
        else:
            self._keep_awaited()
            self._weights.tidy()
        await self.announce_progress()

    async def announce_weights(self, digest: str) -> None:
        """Publish the present version's weights, which are in their file already, and set the key `policy`."""
        async with self._sending:
            self._keep_awaited()
            await self._weights.publish(self._state.policy, digest)
        self._ports.metrics.set("learner_policy_version", self._state.step)

    async def repair_weights(self, damaged: PolicyVersion) -> None:
        """Give actors a key frame if one of them cannot make the version `damaged` from what the broker holds."""
        async with self._sending:
            if self._weights.lacks_newest:
                # Between two steps the engine has the present version, which may be newer than the one that is gone.
                policy = self._state.policy
                log.warning("weights_written_again", damaged=str(damaged), version=str(policy))
                digest = await self._ports.engine.write_weights(self._weights.path_for(policy))
                await self._weights.publish(policy, digest)
            else:
                await self._weights.repair(damaged)

    def _keep_awaited(self) -> None:
        # Publishing and tidying remove old files, but an evaluation may end many steps after its version was made.
        self._weights.held = self._state.versions_awaited()
