"""How weights reach the policy: the newest announced version is fetched, verified and applied between two tokens.

Place in the flow: announced Version → **applied Version**. The learner announces under the key `policy`; a version
that a newer one has overtaken is never fetched.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from horizonrl.actors.policy import ChangedWords, Policy
from horizonrl.actors.weights.host_copy import Shadow, age
from horizonrl.actors.weights.lora_copy import MergedImage
from horizonrl.actors.weights.words import changed_words, compare
from horizonrl.broker.api import Key, Transport
from horizonrl.broker.state import StateStore
from horizonrl.broker.weights.frames import shared_frame
from horizonrl.common.errors import BrokerError, WeightsDamaged, WeightsRejected
from horizonrl.common.logs import get_logger
from horizonrl.common.metrics import Metrics
from horizonrl.common.state import WeightsManifest
from horizonrl.common.types import PolicyVersion

log = get_logger()

RETRY_S = 5.0
"""Wait before weights that could not be fetched are tried again, doubled with each failure in a row; the next
announcement ends it early."""
LONGEST_RETRY_S = 160.0
"""A key frame that many actors fetch in vain, again and again, would take the line from all others."""


@dataclass(frozen=True, slots=True)
class _Applied:
    """What the engine computes with: the base of the next version's changed words."""

    policy: PolicyVersion
    digest: str
    file: BinaryIO | None
    """The learner's own file, if it was loaded from there: nobody writes to it, and it is held open."""


class WeightsFollower:
    def __init__(
        self,
        transport: Transport,
        policy: Policy,
        shadow_dir: Path,
        metrics: Metrics | None = None,
        shared_dir: Path | None = None,
    ) -> None:
        """`shadow_dir` holds the newest weights of this run for all actors of this host (`host_copy.py`).

        A frame that the learner announces as a file in `shared_dir` is read where it is.
        """
        self._transport = transport
        self._policy = policy
        self._shared_dir = shared_dir
        self._metrics = metrics or Metrics()
        self._shadow = Shadow(transport, shadow_dir, self._metrics, notes=policy.takes_words)
        self._merged = MergedImage(transport, shadow_dir, self._metrics)
        self._announced: WeightsManifest | None = None
        self._base: _Applied | None = None
        self._digest: str | None = None
        """Of the weights that were applied last; None before there were any."""
        self._learner = ""
        """The learner that announced them."""
        self.lost_futures = 0
        """How often the run has gone back behind the weights that were applied, as with a backup that was restored."""
        self._news = asyncio.Event()
        self.finished = asyncio.Event()
        """Set when the learner reports that the run is over."""
        self.damaged: PolicyVersion | None = None
        """The version that could not be made from what the broker holds, until a version can be. Groups tell the
        learner, which then publishes a key frame."""
        # A Condition, because every group waits for a version of its own.
        self._applied = asyncio.Condition()

    async def run(self, total_steps: int) -> None:
        """Follow the learner until cancelled; `total_steps` is the run's length in this actor's config.

        Takes announcements; gives applied weights, and the news that the run is `finished`; waits for the key `policy`;
        woken by the broker. Raises WeightsRejected when the policy's probe fails: the engine has to be replaced.
        """
        self._metrics.set("actor_policy_version", self._policy.version.version)
        # Two tasks, so that announcements are noted while a frame is fetched: all but the newest are then skipped.
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._listen(total_steps))
                group.create_task(self._keep_up())
        finally:
            self._rebase(None)

    async def reached(self, version: PolicyVersion, timeout_s: float) -> bool:
        """Wait until the policy is at least as new as `version`, or as the newest announced one; return whether it is.

        False after `timeout_s`. What is sampled then is older and says so in its spans; the learner decides about it.
        """
        try:
            async with asyncio.timeout(timeout_s):
                if not self._is_applied(version):
                    # The key itself, not `_announced`: the watch may be behind it.
                    newest = await StateStore(self._transport).get(Key.POLICY)
                    if isinstance(newest, WeightsManifest):
                        # With rl.publish_every a ticket may name a version that is never announced: the newest must do.
                        version = min(version, newest.policy, key=age)
                        async with self._applied:
                            await self._applied.wait_for(lambda: self._is_applied(version))
        except TimeoutError:
            log.warning(
                "weights_late",
                wanted=str(version),
                applied=str(self._policy.version),
                waited_s=timeout_s,
            )
            return False
        return True

    async def _listen(self, total_steps: int) -> None:
        """Note the newest announcement. Takes manifests; waits for and is woken by the broker."""
        async for manifest in StateStore(self._transport).until_end(WeightsManifest, total_steps):
            self._announced = manifest
            self._news.set()
        self.finished.set()

    async def _keep_up(self) -> None:
        """Apply the newest announcement. Takes what `_listen` noted; gives applied weights; woken by `_listen`."""
        while True:
            await self._news.wait()
            # Cleared before `_announced` is read: an announcement during an apply sets it again and is not missed.
            self._news.clear()
            wait_s = RETRY_S
            # Read anew each time: after a slow fetch the newest version counts, not the one that was next.
            while self._announced is not None and not self._is_current(self._announced):
                if await self._apply(self._announced):
                    wait_s = RETRY_S
                    continue
                await self._wait_for_news(wait_s)
                wait_s = min(2 * wait_s, LONGEST_RETRY_S)

    async def _apply(self, manifest: WeightsManifest) -> bool:
        """Fetch and apply one version; return False if it could not be fetched."""
        started = time.monotonic()
        restored = self._is_restored()
        async with AsyncExitStack() as stack:
            try:
                # Only this is tried again. A WeightsRejected of the policy ends the actor: its engine is in doubt.
                file, shared = await stack.enter_async_context(self._held(manifest))
            except (WeightsRejected, BrokerError) as error:
                if isinstance(error, WeightsDamaged):
                    self.damaged = manifest.policy
                log.warning("weights_not_fetched", version=str(manifest.policy), reason=str(error))
                return False
            self.damaged = None
            words = await asyncio.to_thread(self._changed_words, file, manifest)
            changed, words_bytes = None, None
            if words is not None:
                changed = ChangedWords(self._policy.version, path_of(stack.enter_context(words)))
                words_bytes = os.fstat(words.fileno()).st_size
            fetched = time.monotonic()
            if restored:
                self.lost_futures += 1
                log.warning(
                    "run_restored",
                    applied=str(self._policy.version),
                    announced=str(manifest.policy),
                )
            await self._policy.apply(file, manifest.policy, changed)
            self._digest, self._learner = manifest.digest, manifest.learner
            if self._policy.takes_words:
                held = None if shared is None else os.fdopen(os.dup(shared.fileno()), "rb")
                self._rebase(_Applied(manifest.policy, manifest.digest, held))
        done = time.monotonic()
        self._metrics.observe("weights_apply_seconds", done - started)
        self._metrics.set("actor_policy_version", manifest.policy.version)
        log.info(
            "weights_applied",
            version=str(manifest.policy),
            digest=manifest.digest,
            words_bytes=words_bytes,
            fetch_s=round(fetched - started, 3),
            apply_s=round(done - fetched, 3),
        )
        # Also wakes those that wait for an older version: a newer one will do.
        async with self._applied:
            self._applied.notify_all()
        return True

    @asynccontextmanager
    async def _held(self, manifest: WeightsManifest) -> AsyncIterator[tuple[Path, BinaryIO | None]]:
        """Hold the announced version as a file: the learner's own if it is shared, which is open, else this host's."""
        # In a thread: the event loop extends leases, and reading a whole frame would hold it up.
        shared = await asyncio.to_thread(shared_frame, manifest, self._shared_dir)
        if shared is not None:
            try:
                source = shared.open("rb")
            except OSError as error:
                raise WeightsRejected(f"{manifest.policy} has been overtaken: {error}") from None
            with source:
                # Open, since the learner may remove the file during a drain (`actor.weights = "drained"`): minutes.
                yield path_of(source), source
            return
        if manifest.path is not None and not manifest.chunks:
            raise WeightsDamaged(
                f"{manifest.policy} was announced as the file {manifest.path}, which is gone or has other bytes: the "
                "learner writes it again when a group tells it. On another machine, set broker.shared_files = false"
            )
        image = self._shadow if manifest.adapters is None else self._merged
        async with image.holding(manifest) as file:
            yield file, None

    def _changed_words(self, file: Path, manifest: WeightsManifest) -> BinaryIO | None:
        """Return the words by which a version differs from what the engine computes with, or None if it is unknown."""
        base = self._base
        if base is None or base.policy != self._policy.version:
            return None
        if base.file is not None:
            positions = compare(path_of(base.file), file)
        else:
            positions = self._shadow.changed_since(base.digest, manifest.digest)
        return None if positions is None else changed_words(file, positions)

    def _rebase(self, base: _Applied | None) -> None:
        """Note what the engine computes with now."""
        if self._base is not None and self._base.file is not None:
            self._base.file.close()
        self._base = base

    async def _wait_for_news(self, wait_s: float) -> None:
        try:
            async with asyncio.timeout(wait_s):
                await self._news.wait()
        except TimeoutError:
            return
        self._news.clear()

    def _is_applied(self, version: PolicyVersion) -> bool:
        return age(self._policy.version) >= age(version) and not self._is_restored()

    def _is_current(self, manifest: WeightsManifest) -> bool:
        # The digest too: a run that went back to a backup gives a name to other weights than before.
        return (self._policy.version, self._digest) == (manifest.policy, manifest.digest)

    def _is_restored(self) -> bool:
        """Return whether the run has gone back behind what was applied, as its last announcement shows."""
        announced, applied = self._announced, self._policy.version
        if announced is None or self._digest is None or self._is_current(announced):
            return False
        # An actor that was cut off meanwhile hears of the new line when that has a newer version.
        same_line = (
            announced.policy.lineage != applied.lineage or announced.learner == self._learner
        )
        return age(announced.policy) <= age(applied) or not same_line


def path_of(file: BinaryIO) -> Path:
    """Return a name of an open file, for the engine's process too: it may have no other any more."""
    return Path(f"/proc/{os.getpid()}/fd/{file.fileno()}")
