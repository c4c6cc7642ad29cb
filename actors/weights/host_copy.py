"""The shadow: one image of the newest weights per host, which its actors bring up to date and load in turn.

Place in the flow: announced Version → **shadow** → engine. Whoever first wants a version downloads it for all. The
image lies in shared memory, next to a marker that says which version it is:

| file | what it is | lock |
|---|---|---|
| `weights.safetensors` | the image | shared while an engine loads it, exclusive while it is patched |
| `version.json` | its marker; absent while the image is in doubt | that of the image |
| `patched.json` | the marker that the image had before the patch that is under way | that of the image |
| `fetching` | empty | exclusive for the one actor that downloads |
| `changed-*-A-B` | where the patch wrote that led from digest A to B; of the last four | that of the image |
| `reading-*` | a name of the image for one engine, which no other actor moves | that of the image, while it is read |

The kernel frees the locks of an actor that dies. If it died in the middle of a patch, the next one finds no marker: it
digests the image, and fetches the key frame unless that is a version that it knows. Every image is digested once more
before an engine loads it. An actor that is stopped while it holds a lock (SIGSTOP) delays the others by `STUCK_S`; then
they make another image under the same name.
"""

import asyncio
import contextlib
import mmap
import os
import secrets
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import numpy as np
import xxhash

from horizonrl.actors.weights.words import read_note, write_note
from horizonrl.broker.api import Key, Transport
from horizonrl.broker.state import StateStore
from horizonrl.broker.weights.chain import Changes, read_changes
from horizonrl.broker.weights.changes import decode_changes
from horizonrl.broker.weights.frames import digest_file, fetch_frame
from horizonrl.broker.weights.layout import Array, read_layout
from horizonrl.common.errors import LogGap, WeightsDamaged, WeightsRejected
from horizonrl.common.files import atomic_write_text
from horizonrl.common.locks import open_locked, take_lock
from horizonrl.common.logs import get_logger
from horizonrl.common.metrics import Metrics
from horizonrl.common.state import SentFile, WeightsManifest
from horizonrl.common.types import Count, Digest, PolicyVersion, Record

log = get_logger()

IMAGE, MARKER, PATCHED, FETCHING, READING, CHANGED = (
    "weights.safetensors",
    "version.json",
    "patched.json",
    "fetching",
    "reading-",
    "changed-",
)
NOTES_KEPT = 4
"""Patches of which it is kept where they wrote: an engine that is further behind loads the whole image."""
STUCK_S = 120.0
"""A lock that is held for longer, without a sign of life, is held by an actor that is stopped. Work does not take the
signs away, however long it is: a task of the holder touches the file (`beating`)."""
POLL_S = 0.02
"""Between two tries of a lock. A thread that waited for it could not be cancelled."""


class Marker(Record):
    """Which version the image is."""

    policy: PolicyVersion
    digest: Digest
    sequence: Count
    """Of the last message that was read for it: later changes follow it in the stream."""
    inode: Count
    """Of the image: a marker that an actor wrote late, for an image that was replaced, counts for nothing."""


class Shadow:
    def __init__(
        self, transport: Transport, directory: Path, metrics: Metrics, notes: bool = False
    ) -> None:
        """`directory` is a directory of this run that the actors of this host share.

        With `notes` it is kept where patches write, for engines that can write into their layers (`words.py`).
        """
        self._transport = transport
        self._place = directory
        self._metrics = metrics
        self._notes = notes
        self._image = directory / IMAGE

    @contextlib.asynccontextmanager
    async def holding(self, manifest: SentFile) -> AsyncIterator[Path]:
        """Have the announced version, and hold it as a file while the body reads it.

        Raises WeightsRejected or LogGap if the version cannot be had, also because a newer one has replaced it.
        """
        if not self._is_at(manifest):
            async with alone(self._place / FETCHING):
                await self._advance(manifest)
        async with self._reading(manifest) as file:
            yield file

    def changed_since(self, base: str, digest: str) -> Array | None:
        """Return where the image with `digest` differs from that with the digest `base`, by what its patches wrote.

        Ascending, and perhaps too many: a word may have changed back. None if the notes do not lead back to `base`.
        """
        positions = [np.empty(0, np.int64)]
        while digest != base:
            note = next(self._place.glob(f"{CHANGED}*-{digest}"), None)
            written = None if note is None or len(positions) > NOTES_KEPT else read_note(note)
            if note is None or written is None:
                return None
            positions.append(written)
            digest = note.name.split("-")[-2]
        return np.unique(np.concatenate(positions))

    # ---- bringing the image up to date

    async def _advance(self, manifest: SentFile) -> None:
        """Make the image the announced version: by the changes since its own, else from the key frame."""
        key = manifest.key_frame
        sweep(self._place)
        marker = await self._identify(manifest)
        if self._is_at(manifest):
            return
        if marker is not None and await self._is_overtaken(marker, manifest):
            raise WeightsRejected(
                f"{manifest.policy} has been overtaken: this host is at {marker.policy}"
            )
        if marker is not None and _leads_on(marker, manifest):
            try:
                await self._follow(marker, manifest)
                return
            except (WeightsRejected, LogGap) as error:
                # The key frame cannot help an image that is whole and has left it behind.
                before = self._marker()
                if before is not None and age(before.policy) >= age(key.policy):
                    raise
                log.warning(
                    "changes_not_followed",
                    have=str(marker.policy),
                    want=str(manifest.policy),
                    why=str(error),
                )
        await self._replace(key)
        await self._follow(self._require_marker(), manifest)

    async def _identify(self, manifest: SentFile) -> Marker | None:
        """Return the image's marker, or None if it is no version from which the announced one can be made."""
        marker, key = self._marker(), manifest.key_frame
        # By their digests: after a patch that was cut off, and after a learner's resume, where names change.
        described = {
            key.digest: (key.policy, key.last_sequence),
            manifest.digest: (manifest.policy, manifest.last_change or manifest.last_sequence),
        }
        if marker is None:
            with contextlib.suppress(OSError, ValueError):
                # Whoever patched the image may have died before the first write.
                before = Marker.model_validate_json((self._place / PATCHED).read_bytes())
                described.setdefault(before.digest, (before.policy, before.sequence))
            # Shared, so that this waits for a cancelled actor's patch, which goes on to its end.
            async with self._locked() as lock:
                digest = None if lock is None else await asyncio.to_thread(digest_file, self._image)
        else:
            digest = marker.digest
        if digest in described and (
            marker is None or age(marker.policy) < age(described[digest][0])
        ):
            self._mark(described[digest][0], digest, described[digest][1])
        return self._marker()

    async def _is_overtaken(self, marker: Marker, manifest: SentFile) -> bool:
        """Return whether the image is of a newer version than the manifest, and one that this run announced."""
        if age(marker.policy) <= age(manifest.policy):
            return False
        # The key itself decides: an image of a run that was begun anew under the same name is newer than all of it.
        newest = await StateStore(self._transport).get(Key.POLICY)
        return isinstance(newest, WeightsManifest) and age(newest.policy) >= age(marker.policy)

    async def _replace(self, key: SentFile) -> None:
        """Fetch a key frame in place of the image."""
        log.info("key_frame_fetched", version=str(key.policy), weights_bytes=key.weights_bytes)
        # Before the fetch: this host has memory for one image. An engine that still loads the old one keeps its name.
        for file in (
            self._marker_file,
            self._place / PATCHED,
            self._image,
            *self._place.glob(f"{CHANGED}*"),
        ):
            file.unlink(missing_ok=True)
        await fetch_frame(self._transport, key, self._image, partial(self._count_bytes, "frame"))
        self._mark(key.policy, key.digest, key.last_sequence)

    async def _follow(self, marker: Marker, manifest: SentFile) -> None:
        """Patch the image with each of the changes that lead to the announced version."""
        if marker.policy == manifest.policy:
            return
        links = read_changes(
            self._transport,
            manifest,
            marker.policy,
            marker.sequence,
            partial(self._count_bytes, "changes"),
        )
        async with contextlib.aclosing(links):
            async for changes in links:
                readers = Silence(self._image)
                while not await asyncio.to_thread(self._patch, changes):
                    if readers.is_long():
                        # So that the key frame replaces the image.
                        self._marker_file.unlink(missing_ok=True)
                        raise WeightsRejected(
                            f"an actor has held {self._image} for {STUCK_S:g} s: is it stopped?"
                        )
                    await asyncio.sleep(POLL_S)

    def _patch(self, changes: Changes) -> bool:
        """Patch the image and mark it; return False, and do nothing, while an engine loads it.

        Everything from lock to marker is in one call of one thread: a cancelled actor does not leave it half-way.
        """
        with self._image.open("r+b") as file:
            if not take_lock(file):
                return False
            marker = self._marker()
            if (
                marker is None
                or marker.inode != os.fstat(file.fileno()).st_ino
                or marker.policy != changes.base
            ):
                raise WeightsRejected(f"another actor has moved the image on from {changes.base}")
            image = mmap.mmap(file.fileno(), 0)
            try:
                decoded = decode_changes(image, changes.data)
            except WeightsRejected as error:
                raise WeightsDamaged(f"{changes.policy}: {error}") from error
            # From here on the image is in doubt, until it has a marker again.
            os.replace(self._marker_file, self._place / PATCHED)
            written = decoded.write(image)
            if xxhash.xxh3_128_hexdigest(image) != changes.digest:
                raise WeightsDamaged(
                    f"{changes.policy}: the changes do not make the weights that were announced"
                )
            self._mark(changes.policy, changes.digest, changes.last_sequence)
            if self._notes:
                # The sequence only orders the names.
                note = f"{CHANGED}{changes.last_sequence:016}-{marker.digest}-{changes.digest}"
                write_note(self._place / note, read_layout(image), written)
                for old in sorted(self._place.glob(f"{CHANGED}*"))[:-NOTES_KEPT]:
                    old.unlink()
        return True

    def _count_bytes(self, form: str, size: int) -> None:
        self._metrics.count("weights_received_bytes_total", size, form=form)

    # ---- the marker

    @property
    def _marker_file(self) -> Path:
        return self._place / MARKER

    def _marker(self) -> Marker | None:
        """Return the image's marker, or None if the image is in doubt."""
        try:
            marker = Marker.model_validate_json(self._marker_file.read_bytes())
            return marker if marker.inode == self._image.stat().st_ino else None
        except (OSError, ValueError):
            return None

    def _require_marker(self) -> Marker:
        if (marker := self._marker()) is None:
            raise WeightsRejected(f"{self._image} has been replaced by another actor")
        return marker

    def _mark(self, policy: PolicyVersion, digest: str, sequence: int) -> None:
        marker = Marker(
            policy=policy, digest=digest, sequence=sequence, inode=self._image.stat().st_ino
        )
        atomic_write_text(self._marker_file, marker.model_dump_json(), rivals=True)

    def _is_at(self, manifest: SentFile) -> bool:
        marker = self._marker()
        return marker is not None and (marker.policy, marker.digest) == (
            manifest.policy,
            manifest.digest,
        )

    # ---- the locks

    @contextlib.asynccontextmanager
    async def _locked(self) -> AsyncIterator[int | None]:
        """Keep the image from being patched; give None if there is none, or an actor is stopped in a patch."""
        began = time.monotonic()
        while (lock := open_locked(self._image, shared=True)) is None:
            if time.monotonic() - began > STUCK_S or not self._image.exists():
                break
            await asyncio.sleep(POLL_S)
        try:
            yield lock
        finally:
            if lock is not None:
                os.close(lock)

    @contextlib.asynccontextmanager
    async def _reading(self, manifest: SentFile) -> AsyncIterator[Path]:
        """Hold the image at the announced version, digested once more, under a name of its own."""
        file = self._place / f"{READING}{secrets.token_hex(8)}.safetensors"
        async with self._locked() as lock:
            if lock is None or not self._is_at(manifest):
                raise WeightsRejected(
                    f"{manifest.policy} has been overtaken: another actor has moved the image on"
                )
            try:
                os.link(self._image, file)
                if await asyncio.to_thread(digest_file, file) != manifest.digest:
                    self._marker_file.unlink(missing_ok=True)
                    raise WeightsRejected(f"{manifest.policy}: its image on this host is damaged")
                # A drain may come before the load (`actor.weights = "drained"`): minutes.
                async with beating(lock):
                    yield file
            finally:
                file.unlink(missing_ok=True)


@contextlib.asynccontextmanager
async def alone(file: Path) -> AsyncIterator[None]:
    """Be the one actor of this host that holds `file`."""
    holder = Silence(file)
    while (lock := open_locked(file, os.O_RDWR | os.O_CREAT)) is None:
        if holder.is_long():
            log.warning("fetching_actor_stuck", silent_s=STUCK_S, file=str(file))
            # Its lock is on a file that no longer has this name. If it wakes, its patch finds another version.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(file)
        await asyncio.sleep(POLL_S)
    try:
        async with beating(lock):
            yield
    finally:
        os.close(lock)


@contextlib.asynccontextmanager
async def beating(lock: int) -> AsyncIterator[None]:
    """Touch a locked file while the body runs, as a sign of life to those that wait for the lock."""

    async def beat() -> None:
        while True:
            os.utime(lock)
            await asyncio.sleep(STUCK_S / 12)

    task = asyncio.create_task(beat())
    try:
        yield
    finally:
        task.cancel()


class Silence:
    """How long a file has had no sign of life. By the watcher's own clock: that of the file may be set."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._last: tuple[int, int] | None = None
        self._since = time.monotonic()

    def is_long(self) -> bool:
        """Return whether the file was there and untouched for `STUCK_S`, in all looks since the first."""
        try:
            status = self._file.stat()
            sign = (status.st_ino, status.st_mtime_ns)
        except FileNotFoundError:
            sign = None
        if sign is None or sign != self._last:
            self._last, self._since = sign, time.monotonic()
        return time.monotonic() - self._since > STUCK_S


def _leads_on(marker: Marker, manifest: SentFile) -> bool:
    """Return whether changes may lead from an image to the announced version: those of one lineage are one line."""
    have, want = marker.policy, manifest.policy
    return (
        have.lineage == want.lineage
        and have.version < want.version
        and marker.sequence < manifest.last_change
    )


def sweep(directory: Path) -> None:
    """Remove the names that engines had for an image and whose actor was killed: nobody holds their lock."""
    for name in directory.glob(f"{READING}*"):
        if (lock := open_locked(name)) is not None:
            name.unlink(missing_ok=True)
            os.close(lock)


def age(policy: PolicyVersion) -> tuple[int, int]:
    """Order versions by time: a resumed learner's line is newer than all of the line before."""
    return policy.lineage, policy.version
