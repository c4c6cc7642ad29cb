"""The publication: the way of a committed version to its file, the ledger, the actors and the metrics.

Place in the flow: **Version** → everyone. It runs beside the waiting for groups and the training of the next step,
which go on as soon as the engine has let the weights out of its hands. One version at a time is on its way: the next
commit waits for it, so the learner's state says of the commit what it said when the publication began.
"""

import asyncio
import time
from dataclasses import dataclass

from horizonrl.common.service import until_stopped
from horizonrl.learner.loop.announcer import Announcer
from horizonrl.learner.loop.ports import Ports
from horizonrl.learner.loop.recorder import Recorder
from horizonrl.learner.loop.state import LearnerState
from horizonrl.learner.loop.weights_publisher import WeightsPublisher
from horizonrl.learner.records.report import StepTimes, TakenStep


@dataclass
class Publication:
    ports: Ports
    state: LearnerState
    weights: WeightsPublisher
    announcer: Announcer
    recorder: Recorder

    def __post_init__(self) -> None:
        self._task: asyncio.Task[None] | None = None

    async def begin(
        self, background: asyncio.TaskGroup, step: TakenStep
    ) -> "asyncio.Future[float]":
        """Begin to publish a step that was just committed; return once the engine may be called again.

        Returns a future that takes the step's seconds, once they are known: the line of metrics waits for them.
        """
        begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        step_s: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._task = background.create_task(self._publish(background, step, begun, step_s))
        # If the task fails before that, the group ends this one.
        await begun
        return step_s

    @property
    def latest(self) -> "asyncio.Task[None] | None":
        """The publication that was begun last."""
        return self._task

    async def ended(self, publication: "asyncio.Task[None] | None" = None) -> None:
        """Wait until a committed step is published and recorded, by default the last one."""
        task = publication or self._task
        if task is not None:
            # Shielded: whoever stops waiting does not stop the publication.
            await asyncio.shield(task)

    async def _publish(
        self,
        background: asyncio.TaskGroup,
        step: TakenStep,
        begun: "asyncio.Future[None]",
        step_s: "asyncio.Future[float]",
    ) -> None:
        # Also for a version that actors never get: the ledger holds its digest, and a checkpoint links its file.
        written = await self.ports.engine.begin_write_weights(self.weights.path_for(step.policy))
        began = time.monotonic()
        begun.set_result(None)
        digest = await written
        # Recorded before it is announced: a step that is known to anyone has a line in the ledger.
        await self.recorder.record_commit(background, step, digest)
        await until_stopped(self.announcer.announce_version(digest), self.ports.stopping)
        publish_s = time.monotonic() - began
        # 0 for a version that actors never get.
        weights_bytes = (
            self.weights.published_bytes
            if self.state.schedule.publishes(step.policy.version)
            else 0
        )
        took_s = await step_s
        times = StepTimes(
            step.wait_s, took_s, publish_s, weights_bytes, ended_at=step.began_at + took_s
        )
        await self.recorder.record_step(step, times)
