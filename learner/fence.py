"""The fence: one learner speaks for a run, and one that has been replaced finds out before it changes anything.

Place in the flow: **Version** → everyone. Whoever set the key `progress` last is the run's learner. Each put names the
revision that this learner set before, so the first put of another one fails: that one is fenced. The key `policy` and
every purge are looked after by the same fence.
"""

from horizonrl.broker.api import Key, Transport
from horizonrl.broker.state import StateStore
from horizonrl.common.errors import Fenced, HorizonError, StateConflict
from horizonrl.common.state import Progress, WeightsManifest


class Fence:
    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._state = StateStore(transport)
        self._progress = 0
        """Revision of the key `progress` that this learner has read or set last."""
        self._policy = 0
        """The same of the key `policy`."""
        self._said: Progress | None = None
        """The last word of this learner; None before its first."""

    async def look(self) -> tuple[Progress | None, WeightsManifest | None]:
        """Return what the run's last learner has said, and change nothing."""
        self._progress = await self._transport.revision(Key.PROGRESS)
        self._policy = await self._transport.revision(Key.POLICY)
        progress, policy = [await self._state.get(key) for key in (Key.PROGRESS, Key.POLICY)]
        return (
            progress if isinstance(progress, Progress) else None,
            policy if isinstance(policy, WeightsManifest) else None,
        )

    async def announce(self, progress: Progress) -> None:
        """Set the key `progress`. Raises Fenced when another learner has set it since this one last looked or spoke."""
        try:
            self._progress = await self._state.put(Key.PROGRESS, progress, self._progress)
        except StateConflict:
            raise await self._refusal() from None
        self._said = progress

    async def check(self) -> None:
        """Raise Fenced when another learner has spoken since this one last did; a defaced key is no learner's word."""
        if await self._transport.revision(Key.PROGRESS) == self._progress:
            return
        if await self._transport.get(Key.PROGRESS) is None or await self._state.get(Key.PROGRESS) is not None:
            raise await self._refusal()

    async def publish(self, manifest: WeightsManifest) -> None:
        """Set the key `policy`. Raises Fenced when this is no longer the run's learner.

        A put between the check and ours is the last word of a learner that we have fenced: ours comes after it.
        """
        while True:
            await self.check()
            try:
                self._policy = await self._state.put(Key.POLICY, manifest, self._policy)
                return
            except StateConflict:
                self._policy = await self._transport.revision(Key.POLICY)

    async def _refusal(self) -> HorizonError:
        """Return why this learner may not speak: it was replaced, or the broker has lost what it said.

        A successor repeats our last word, then speaks for a later lineage; an older word is ours, and newer ones lost.
        """
        held, said = await self._state.get(Key.PROGRESS), self._said
        replaced = isinstance(held, Progress) and (
            said is None or held == said or held.policy.lineage > said.policy.lineage
        )
        if replaced:
            return Fenced(
                "another learner speaks for this run: end one of the two, or give this run another run.name. This one "
                "ends, and is not to be started again while the other one lives"
            )
        return StateConflict(
            "the broker no longer holds what this learner said last, as after a power cut: start the learner again, it "
            "resumes"
        )
