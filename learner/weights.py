"""Publish new weights: as a key frame through the broker, or as a shared file if the whole run is on one machine.

Place in the flow: Batch → **Version** → actors. The `policy` key is set last, so that an actor that reads it finds the
frame.
"""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from horizonrl.broker.api import Transport
from horizonrl.broker.weights.frames import discard_frames_below, publish_frame
from horizonrl.common.state import WeightsManifest
from horizonrl.common.types import PolicyVersion
from horizonrl.learner.engine.weights_file import INCOMING
from horizonrl.learner.fence import Fence

FILES_KEPT = 3
"""The newest frame and the two before it. An actor may still read one, and the learner compares engines on them."""


@dataclass
class WeightsPublisher:
    transport: Transport
    fence: Fence
    directory: Path
    share_files: bool
    """Actors read the weights files themselves: they run on this machine."""
    held: Collection[int] = ()
    """Versions whose files are kept, however old: one of them may turn out to be the best."""

    def __post_init__(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        for unfinished in self.directory.glob(f".*{INCOMING}"):
            unfinished.unlink()  # left by a learner that was killed: there is only one at a time (`only_learner`)
        self._previous: WeightsManifest | None = None
        # The file that the key names and the one before it, which an actor may still be reading.
        self._published: deque[Path] = deque(maxlen=2)

    def path_for(self, policy: PolicyVersion) -> Path:
        """Return where to write the weights of a version."""
        # With the lineage: a learner that resumes must not write over a file that an actor may be reading.
        return self.directory / f"frame-{policy.version:06d}-{policy.lineage:03d}.safetensors"

    def find(self, policy: PolicyVersion) -> Path | None:
        """Return the file of a version if it is still kept. The same number in another lineage is another version."""
        file = self.path_for(policy)
        return file if file.is_file() else None

    async def publish(self, policy: PolicyVersion, digest: str) -> None:
        """Publish the file at `path_for(policy)`. Raises Fenced if another learner speaks for the run."""
        # Chunks are stored without a condition: a learner that has been replaced must not write any.
        await self.fence.check()
        file = self.path_for(policy)
        if self.share_files:
            manifest = WeightsManifest(
                policy=policy, weights_bytes=file.stat().st_size, digest=digest, path=str(file.resolve())
            )
        else:
            manifest = await publish_frame(self.transport, file, policy, digest)
        await self.fence.publish(manifest)
        # The frame before this one stays: an actor that read the key a moment ago is still fetching it.
        if not self.share_files and self._previous is not None:
            await discard_frames_below(self.transport, self._previous)
        self._previous = manifest
        self._published.append(file)
        self.tidy()

    async def announce_end(self, step: int) -> None:
        """Tell the actors, which follow the key `policy`, that the run is over after `step`."""
        # The last version is always published, and a learner that resumes publishes its own (`Recovery.resume`).
        if self._previous is not None:
            await self.fence.publish(self._previous.model_copy(update={"finished_step": step}))

    def tidy(self) -> None:
        """Remove all files but the newest, the last two that were published, and those of the versions in `held`."""
        # The evaluation's schedule knows versions but no lineages, so files of every lineage are held.
        held = tuple(f"frame-{version:06d}-" for version in self.held)
        # By age, not by name: a learner that resumes writes lower numbers again.
        frames = sorted(self.directory.glob("frame-*.safetensors"), key=lambda file: file.stat().st_mtime)
        for file in frames[:-FILES_KEPT]:
            if file not in self._published and not file.name.startswith(held):
                file.unlink()
