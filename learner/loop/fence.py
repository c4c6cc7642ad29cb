"""The fence: one learner speaks for a run, and one that has been replaced finds out before it changes anything.

Place in the flow: **Version** → everyone. The learner that set the key `progress` last is the run's learner. Each put
names the revision that this learner set before, so once another learner has spoken, the put fails and this learner is
fenced. The same fence guards the key `policy` and every purge.
"""

import asyncio
import uuid

from horizonrl.broker.api import Key, Transport
from horizonrl.broker.state import StateStore
from horizonrl.common.errors import Fenced, HorizonError, StateConflict
from horizonrl.common.state import Progress, WeightsManifest


class Fence:
    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._state = StateStore(transport)
        self._progress = 0
        """Revision of the key `progress` that this learner last read or set."""
        self._learner = uuid.uuid4().hex
        self._policy = 0
        """Revision of the key `policy` that this learner last read or set."""
        # A checkpoint is sealed, and the log freed behind it, while the loop announces: without the lock, a check that
        # compares a revision read before an announcement with the one after it takes this learner for its successor.
        self._speaking = asyncio.Lock()
        self._last_word = Progress()
        """What this learner announced last, once it has taken the run over."""

    async def look(self) -> tuple[Progress | None, WeightsManifest | None]:
        """Return what the run's last learner announced: its progress and its weights. Changes nothing."""
        # Revisions before values: a learner that speaks between the two requests makes this one's first put fail.
        self._progress = await self._transport.revision(Key.PROGRESS)
        self._policy = await self._transport.revision(Key.POLICY)
        progress, policy = [await self._state.get(key) for key in (Key.PROGRESS, Key.POLICY)]
        return (
            progress if isinstance(progress, Progress) else None,
            policy if isinstance(policy, WeightsManifest) else None,
        )

    async def take_over(self, earlier: Progress | None, first: Progress) -> bool:
        """Repeat what `look` found, which fences the last learner; say `first` if there is none.

        Returns False if an earlier learner has spoken since the look: it lives, or it died while its word was on its
        way. Raises Fenced if another learner speaks for `first`'s lineage or a later one.
        """
        async with self._speaking:
            try:
                await self._say(earlier or first)
                return True
            except StateConflict:
                held, weights = await self.look()
        lineages = [record.policy.lineage for record in (held, weights) if record is not None]
        # A run's very first word may come late as well: it says what this learner would have said.
        begun = earlier is not None or weights is not None or held != first
        if begun and max(lineages, default=-1) >= first.policy.lineage:
            raise _replaced()
        return False

    async def announce(self, progress: Progress) -> None:
        """Set the key `progress`. Raises Fenced if another learner has set it since this one last spoke."""
        async with self._speaking:
            try:
                await self._say(progress)
            except StateConflict:
                raise await self._refusal() from None

    async def _say(self, word: Progress) -> None:
        # The broker compares and sets in one request, so no other learner can come between a check and the put.
        self._progress = await self._state.put(Key.PROGRESS, word, self._progress)
        self._last_word = word

    async def check(self) -> None:
        """Raise Fenced if another learner has spoken since this one last did."""
        async with self._speaking:
            await self._check()

    async def publish(self, manifest: WeightsManifest) -> None:
        """Set the key `policy`, in this learner's name. Raises Fenced if this is no longer the run's learner."""
        manifest = manifest.model_copy(update={"learner": self._learner})
        async with self._speaking:
            while True:
                await self._check()
                try:
                    self._policy = await self._state.put(Key.POLICY, manifest, self._policy)
                    return
                except StateConflict:
                    # A learner that this one has fenced had passed its own check before: it has set the key once more.
                    self._policy = await self._transport.revision(Key.POLICY)

    async def _check(self) -> None:
        # For frames and purges, which have no condition that the broker could check: they are preceded by this look
        # (ADR 10).
        if await self._transport.revision(Key.PROGRESS) == self._progress:
            return
        # A key that no longer decodes was defaced by someone else: no learner has spoken.
        if (
            await self._transport.get(Key.PROGRESS) is None
            or await self._state.get(Key.PROGRESS) is not None
        ):
            raise await self._refusal()

    async def _refusal(self) -> HorizonError:
        """Return why this learner may not speak: another one replaced it, or the broker has lost what it announced.

        A successor first repeats this learner's last word, then speaks for a later lineage. If the key holds an older
        word of this learner, the broker has lost the newer ones. So it has if the word is the same and its revision is
        older: a learner that waits says the same again.
        """
        newer = await self._transport.revision(Key.PROGRESS) > self._progress
        held, ours = await self._state.get(Key.PROGRESS), self._last_word
        if isinstance(held, Progress) and (
            (newer and held == ours) or held.policy.lineage > ours.policy.lineage
        ):
            return _replaced()
        return StateConflict(
            "the broker no longer holds what this learner announced last, as after a power cut: start the learner "
            "again, and it resumes"
        )


def _replaced() -> Fenced:
    return Fenced(
        "another learner speaks for this run: end one of the two, or give this run another run.name. This learner ends "
        "now; do not start it again while the other one runs"
    )
