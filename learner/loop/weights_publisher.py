"""Publish new weights: through the broker, or as a shared file if the whole run is on one machine.

Place in the flow: Batch → **Version** → actors. Through the broker go a key frame, which is a whole file, and after it
the changes from version to version. With LoRA these are of the adapters, and the frozen model goes once. The `policy`
key is set last, so that an actor that reads it finds what it names.
"""

import asyncio
import mmap
import time
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from horizonrl.broker.api import Key, Stream, Transport
from horizonrl.broker.state import StateStore
from horizonrl.broker.weights.chain import publish_changes
from horizonrl.broker.weights.changes import encode_changes
from horizonrl.broker.weights.frames import BASE, digest_file, discard_frames_below, publish_frame
from horizonrl.common.errors import MissingDependency, WeightsRejected
from horizonrl.common.files import remove_unfinished
from horizonrl.common.logs import get_logger
from horizonrl.common.metrics import Metrics
from horizonrl.common.run_dir import FRAME_FILE
from horizonrl.common.state import SentFile, WeightsManifest
from horizonrl.common.types import PolicyVersion
from horizonrl.learner.disk import FILES_KEPT
from horizonrl.learner.engine.checkpoint.weights_file import ADAPTERS
from horizonrl.learner.loop.fence import Fence

log = get_logger()

LONGEST_CHAIN = 64
"""Versions between two key frames, at most. Changes come to about 1/66 of a frame at a learning rate of 4e-5, so this
doubles what a learner sends at most; and an actor that begins applies 64 of them in 64 times 0.1 s per 135M
parameters."""
REPAIR_S = 600.0
"""Least time between two key frames that actors have asked for, doubled each time: one actor that asks for ever gets at
most ten of them in a week."""
BASE_RENEWED = 4
"""The frozen model is sent again when the stream holds this many times its bytes. What is older than the new one can
then go, and a mirror with a limit of five times the weights never loses it."""


@dataclass
class WeightsPublisher:
    transport: Transport
    fence: Fence
    directory: Path
    share_files: bool
    """Actors read the weights files themselves: they run on this machine."""
    held: Collection[int] = ()
    """Versions whose files are kept, however old: one of them may turn out to be the best."""
    metrics: Metrics = field(default_factory=Metrics)
    longest_chain: int = field(default_factory=lambda: LONGEST_CHAIN)

    def __post_init__(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        remove_unfinished(self.directory)  # there is only one learner at a time (`only_learner`)
        # The file that the key names and the one before it, which an actor may still be reading.
        self._published: deque[Path] = deque(maxlen=2)
        self._being_read: list[Path] = []
        self._key_frames: deque[WeightsManifest] = deque(maxlen=2)
        """The newest key frame of this learner, and the one before it."""
        self._base: SentFile | None = None
        """The frozen model in the stream, to which adapters are added."""
        self._newest: WeightsManifest | None = None
        """The version that this learner published last."""
        self._chain: list[int] = []
        """Bytes of each of the changes since the newest key frame."""
        self._purged_below = 0
        self._repair_at, self._repair_pause_s = 0.0, REPAIR_S
        self.published_bytes = 0
        """Bytes of the last version as it was published: sent to the broker, or in a file that actors read."""

    @property
    def base_file(self) -> Path:
        """Where the frozen model's weights are: with them there, versions travel as adapters."""
        return self.directory / "base.safetensors"

    def path_for(self, policy: PolicyVersion) -> Path:
        """Return where to write the weights of a version."""
        # With the lineage: a learner that resumes must not write over a file that an actor may be reading.
        return self.directory / f"frame-{policy.version:06d}-{policy.lineage:03d}.safetensors"

    def find(self, policy: PolicyVersion) -> Path | None:
        """Return the file of a version if it is still kept. The same number in another lineage is another version."""
        file = self.path_for(policy)
        return file if file.is_file() else None

    @contextmanager
    def reading(self, policy: PolicyVersion) -> Iterator[Path | None]:
        """Give the file of a version, or None if it is not kept; no publication removes it while the body reads it."""
        file = self.path_for(policy)
        self._being_read.append(file)
        try:
            yield self.find(policy)
        finally:
            self._being_read.remove(file)

    async def publish(self, policy: PolicyVersion, digest: str) -> None:
        """Publish the file at `path_for(policy)`. Raises Fenced if another learner speaks for the run."""
        file = self.path_for(policy)
        if self.share_files:
            await self.fence.check()
            size = file.stat().st_size
            manifest = WeightsManifest(
                policy=policy, weights_bytes=size, digest=digest, path=str(file.resolve())
            )
            self.metrics.count("weights_published_bytes_total", size, form="file")
        elif file.with_suffix(ADAPTERS).is_file() and self.base_file.is_file():
            manifest, size = await self._send_adapters(file, policy, digest)
        else:
            manifest, size = await self._send(file, policy, digest)
        self.published_bytes = size
        await self.fence.publish(manifest)
        if not self.share_files:
            await self._discard()
        self._newest = manifest
        self._published.append(file)
        self.tidy()

    async def repair(self, damaged: PolicyVersion) -> None:
        """Publish a key frame of the newest version, because an actor could not make `damaged` from the stream.

        Does nothing if the newest key frame is of that version or of a later one, or soon after another repair.
        """
        newest, now = self._newest, time.monotonic()
        # Without changes after it, the newest version is a key frame, whose chunks' ids are taken.
        if (
            newest is None
            or not self._chain
            or damaged.lineage != newest.policy.lineage
            or now < self._repair_at
        ):
            return
        sent = newest.adapters or newest
        if not sent.key_frame.policy.version < damaged.version <= newest.policy.version:
            return
        self._repair_at, self._repair_pause_s = now + self._repair_pause_s, 2 * self._repair_pause_s
        log.warning("key_frame_asked_for", damaged=str(damaged), version=str(newest.policy))
        await self.fence.check()
        file = self._published[-1]
        await self._send_frame(
            file.with_suffix(ADAPTERS) if newest.adapters else file, newest.policy, sent.digest
        )
        self.metrics.set("weights_chain_versions", 0)
        manifest = self._manifest(newest.policy, sent.digest, sent.last_change)
        self._newest = (
            newest.model_copy(update={"adapters": _sent_file(manifest)})
            if newest.adapters
            else manifest
        )
        await self.fence.publish(self._newest)
        await self._discard()

    @property
    def lacks_newest(self) -> bool:
        """Whether somebody has removed the shared file of the version that was published last."""
        return self.share_files and bool(self._published) and not self._published[-1].is_file()

    async def announce_end(self, step: int) -> None:
        """Tell the actors, which follow the key `policy`, that the run is over after `step`."""
        # The last version is always published, and a learner that resumes publishes its own (`Recovery.resume`).
        if self._newest is not None:
            await self.fence.publish(self._newest.model_copy(update={"finished_step": step}))

    async def _send_adapters(
        self, file: Path, policy: PolicyVersion, digest: str
    ) -> tuple[WeightsManifest, int]:
        """Store a version's adapters, and the frozen model unless it is there; return manifest and bytes."""
        file_own = file.with_suffix(ADAPTERS)
        base, base_bytes = await self._sent_base(policy)
        adapters, size = await self._send(
            file_own, policy, await asyncio.to_thread(digest_file, file_own)
        )
        merged_bytes = (await asyncio.to_thread(file.stat)).st_size
        manifest = WeightsManifest(
            policy=policy,
            weights_bytes=merged_bytes,
            digest=digest,
            adapters=_sent_file(adapters),
            base=base,
        )
        return manifest, size + base_bytes

    async def _sent_base(self, policy: PolicyVersion) -> tuple[SentFile, int]:
        """Have the frozen model in the stream; return where it is, and the bytes that were sent for it."""
        if self._base is None:
            digest = await asyncio.to_thread(digest_file, self.base_file)
            announced = await StateStore(self.transport).get(Key.POLICY)
            if isinstance(announced, WeightsManifest) and announced.base is not None:
                # Sent by the learner before this one, which may have had another model.
                self._base = announced.base if announced.base.digest == digest else None
        else:
            digest = self._base.digest
        if self._base is not None:
            extent, base = await self.transport.extent(Stream.WEIGHTS), self._base
            held = (
                extent.first_sequence <= base.first_sequence
                and base.last_sequence <= extent.last_sequence
            )
            if held and extent.stored_bytes <= BASE_RENEWED * base.weights_bytes:
                return base, 0
        await self.fence.check()
        manifest = await publish_frame(self.transport, self.base_file, policy, digest, BASE)
        self.metrics.count("weights_published_bytes_total", manifest.weights_bytes, form="base")
        self._base = _sent_file(manifest)
        self._published.clear()  # so that a key frame of the adapters follows: what is older goes with the old base
        return self._base, manifest.weights_bytes

    async def _send(
        self, file: Path, policy: PolicyVersion, digest: str
    ) -> tuple[WeightsManifest, int]:
        """Store the changes since the last version, and a key frame when one is due; return manifest and bytes."""
        changes = await self._changes(file)
        # Chunks are stored without a condition: a learner that has been replaced must not write any.
        await self.fence.check()
        sent, last_change = 0, 0
        if changes is not None and self._newest is not None:
            # Also to a version that gets a key frame: actors that have the last one need no frame.
            last_change = await publish_changes(
                self.transport, changes, self._newest.policy, policy, digest
            )
            self._chain.append(len(changes))
            self.metrics.count("weights_published_bytes_total", len(changes), form="changes")
            sent = len(changes)
        if changes is None or self._key_frame_due():
            sent += await self._send_frame(file, policy, digest)
        self.metrics.set("weights_chain_versions", len(self._chain))
        return self._manifest(policy, digest, last_change), sent

    async def _send_frame(self, file: Path, policy: PolicyVersion, digest: str) -> int:
        """Store a key frame, with which a new chain begins; return its bytes."""
        frame = await publish_frame(self.transport, file, policy, digest)
        self._key_frames.append(frame)
        self._chain.clear()
        self.metrics.count("weights_published_bytes_total", frame.weights_bytes, form="frame")
        return frame.weights_bytes

    def _manifest(self, policy: PolicyVersion, digest: str, last_change: int) -> WeightsManifest:
        """Return what the key says of a version that the newest key frame and the changes after it make."""
        key = self._key_frames[-1]
        newest = {"policy": policy, "digest": digest, "last_change": last_change}
        return key.model_copy(update=newest | {"key_policy": key.policy, "key_digest": key.digest})

    def _key_frame_due(self) -> bool:
        """Return whether an actor that begins would receive more than two frames, or apply too many changes."""
        # Adapters' frames are small next to the frozen model, which such an actor receives in any case.
        frame = self._base or self._key_frames[-1]
        return len(self._chain) >= self.longest_chain or sum(self._chain) > frame.weights_bytes

    async def _changes(self, file: Path) -> bytes | None:
        """Return the changes since the version published last, or None if this learner has published none."""
        before = self._published[-1].with_suffix(file.suffix) if self._published else None
        if before is None or not before.is_file():
            return None
        try:
            # In a thread: the event loop answers the broker and the health checks meanwhile.
            return await asyncio.to_thread(changes_between, before, file)
        except MissingDependency as error:
            log.warning("weights_not_encoded", reason=str(error), sent="a key frame")
            return None

    async def _discard(self) -> None:
        """Remove from the stream what nobody needs any more."""
        if len(self._key_frames) < 2 and self._newest is None:
            return  # an actor that read the key a moment ago is still fetching from an earlier learner's frame
        # The key frame before the newest stays, and the changes after it: an actor may be that far behind.
        # Adapters are of no use without the frozen model, which was sent before them.
        oldest = (self._newest.base if self._newest else None) or self._key_frames[0]
        if oldest.first_sequence > self._purged_below:
            await discard_frames_below(self.transport, oldest)
            self._purged_below = oldest.first_sequence

    def tidy(self) -> None:
        """Remove all files but the newest, the last two that were published, and those of the versions in `held`."""
        # The evaluation's schedule knows versions but no lineages, so files of every lineage are held.
        held = tuple(f"frame-{version:06d}-" for version in self.held)
        # What somebody else has put there is left alone.
        files = [file for file in self.directory.glob("frame-*") if file.is_file()]
        ours = [file for file in files if FRAME_FILE.fullmatch(file.name)]
        frames = sorted(ours, key=_written)
        for file in frames[:-FILES_KEPT]:
            if file not in (*self._published, *self._being_read) and not file.name.startswith(held):
                file.unlink()
                file.with_suffix(ADAPTERS).unlink(missing_ok=True)


def _written(frame: Path) -> tuple[int, int]:
    """Return (lineage, version): a learner that resumes writes lower versions again, and no clock tells the order."""
    _, version, lineage = frame.stem.split("-")
    return int(lineage), int(version)


def _sent_file(manifest: WeightsManifest) -> SentFile:
    return SentFile(**{name: getattr(manifest, name) for name in SentFile.model_fields})


def changes_between(base: Path, new: Path) -> bytes | None:
    """Return what turns one weights file into another, or None if a key frame is no larger or there is no other way.

    Both files are mapped, not read into memory.
    """
    with base.open("rb") as old, new.open("rb") as young:
        images = [mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) for file in (old, young)]
        try:
            changes = encode_changes(*images)
        except WeightsRejected:  # not safetensors, or other tensors
            return None
        return changes if len(changes) < len(images[1]) else None
