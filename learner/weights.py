"""Announce new weights: a key frame through the broker, or a shared file when the whole run is on one machine.

Place in the flow: Batch → **Version** → actors. The `policy` key is set last, so that whoever reads it finds the frame.
"""

import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from horizonrl.broker.api import Transport
from horizonrl.broker.weights import discard_frames_below, publish_frame
from horizonrl.common.state import WeightsManifest
from horizonrl.common.types import PolicyVersion
from horizonrl.learner.engine.weights_file import INCOMING
from horizonrl.learner.fence import Fence

FILES_KEPT = 3
"""The newest frame and the two before it: an actor may still read one, and the learner compares engines on them."""


@dataclass
class WeightsPublisher:
    transport: Transport
    fence: Fence
    directory: Path
    share_files: bool
    """Actors read the file itself: they are on this machine."""
    held: Collection[int] = ()
    """Versions whose files stay, however old: they may turn out to be the best."""

    def __post_init__(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        for unfinished in self.directory.glob(f".*{INCOMING}"):
            unfinished.unlink()  # of a learner that was killed: there is one at a time (`only_learner`)
        self._previous: WeightsManifest | None = None
        self._announced: deque[Path] = deque(maxlen=2)

    def path_for(self, policy: PolicyVersion) -> Path:
        """Return where the weights of a version are to be written."""
        return self.directory / f"frame-{policy.version:06d}-{policy.lineage:03d}.safetensors"

    def find(self, policy: PolicyVersion) -> Path | None:
        """Return the file of a version if it is still kept; the same number of another lineage is another version."""
        file = self.path_for(policy)
        return file if file.is_file() else None

    async def announce(self, policy: PolicyVersion, digest: str) -> tuple[WeightsManifest, float]:
        """Publish the file at `path_for(policy)`; return its manifest and the seconds it took.

        Raises Fenced when another learner speaks for the run.
        """
        started = time.monotonic()
        await self.fence.check()
        file = self.path_for(policy)
        if self.share_files:
            manifest = WeightsManifest(
                policy=policy, weights_bytes=file.stat().st_size, digest=digest, path=str(file.resolve())
            )
        else:
            manifest = await publish_frame(self.transport, file, policy, digest)
        await self.fence.publish(manifest)
        if not self.share_files and self._previous is not None:
            await discard_frames_below(self.transport, self._previous)
        self._previous = manifest
        self._announced.append(file)
        self.tidy()
        return manifest, time.monotonic() - started

    def tidy(self) -> None:
        """Remove all but the newest files, the last two that were announced, and those of the versions held."""
        held = tuple(f"frame-{version:06d}-" for version in self.held)
        frames = sorted(self.directory.glob("frame-*.safetensors"), key=lambda file: file.stat().st_mtime)
        for file in frames[:-FILES_KEPT]:
            if file not in self._announced and not file.name.startswith(held):
                file.unlink()
