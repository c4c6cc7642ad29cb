"""The merged image: with LoRA, the frozen model and the newest adapters added up, once per host.

Place in the flow: announced Version → shadow of the adapters → **merged image** → engine. Next to the directory of the
adapters' shadow lie the frozen model, which is fetched once, and the image. Each has a note of its digest, written
last. Only the actor that holds `merging` writes. The image is made under another name, so nobody sees half of one, and
digested once more before an engine loads it.
"""

import asyncio
import contextlib
import mmap
import os
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import xxhash

from horizonrl.actors.weights.host_copy import READING, Shadow, alone, sweep
from horizonrl.broker.api import Transport
from horizonrl.broker.weights.adapters import merge_adapters
from horizonrl.broker.weights.frames import BASE, digest_file, fetch_frame
from horizonrl.common.errors import WeightsRejected
from horizonrl.common.files import atomic_write, remove_unfinished
from horizonrl.common.locks import open_locked
from horizonrl.common.logs import get_logger
from horizonrl.common.metrics import Metrics
from horizonrl.common.state import SentFile, WeightsManifest

log = get_logger()

FROZEN, MERGED, MERGING = "base.safetensors", "merged.safetensors", "merging"


class MergedImage:
    def __init__(self, transport: Transport, directory: Path, metrics: Metrics) -> None:
        """`directory` is a directory of this run that the actors of this host share."""
        self._transport = transport
        self._place = directory
        self._metrics = metrics
        self._adapters = Shadow(transport, directory / "adapters", metrics)

    @contextlib.asynccontextmanager
    async def holding(self, manifest: WeightsManifest) -> AsyncIterator[Path]:
        """Have the announced version, and hold it as a file while the body reads it.

        Raises WeightsRejected or LogGap if the version cannot be had, also because a newer one has replaced it.
        """
        if manifest.adapters is None or manifest.base is None:
            raise WeightsRejected(
                f"{manifest.policy} is not announced as adapters of a frozen model"
            )
        (self._place / "adapters").mkdir(exist_ok=True)
        file, lock = self._place / f"{READING}{secrets.token_hex(8)}.safetensors", None
        try:
            async with alone(self._place / MERGING):
                image = self._place / MERGED
                if _read_note(image) != manifest.digest:
                    # The long download first: nobody patches the adapters while they are held.
                    base = await self._frozen(manifest.base)
                    # An image that a killed actor's engine held is memory that the new one needs.
                    sweep(self._place)
                    async with self._adapters.holding(manifest.adapters) as adapters:
                        await asyncio.to_thread(self._merge, base, adapters, manifest)
                # A name for this engine, which keeps the image when another actor replaces it.
                os.link(image, file)
                lock = open_locked(file, shared=True)
            if await asyncio.to_thread(digest_file, file) != manifest.digest:
                _note(self._place / MERGED).unlink(missing_ok=True)
                raise WeightsRejected(f"{manifest.policy}: its image on this host is damaged")
            yield file
        finally:
            file.unlink(missing_ok=True)
            if lock is not None:
                os.close(lock)

    async def _frozen(self, base: SentFile) -> Path:
        """Return the frozen model's file, fetched unless it is there."""
        file = self._place / FROZEN
        if _read_note(file) != base.digest:
            log.info(
                "frozen_model_fetched", version=str(base.policy), weights_bytes=base.weights_bytes
            )
            for old in (_note(file), file):
                old.unlink(missing_ok=True)
            await fetch_frame(self._transport, base, file, self._count_bytes, BASE)
            _note(file).write_text(base.digest, encoding="utf-8")
        return file

    def _merge(self, base: Path, adapters: Path, manifest: WeightsManifest) -> None:
        """Make the image of a version. Raises WeightsRejected if it is not the one that was announced."""
        image = self._place / MERGED
        # Before a new one is made: this host has memory for one. An engine that still loads the old one keeps it open.
        for old in (_note(image), image):
            old.unlink(missing_ok=True)
        remove_unfinished(self._place)
        try:
            # The other writer is an actor that was stopped, and wakes.
            with atomic_write(image, rivals=True) as incoming:
                digest = _write_merged(base, adapters, incoming)
                if digest != manifest.digest:
                    # The adapters have just been verified: if the frozen model is damaged, the next try fetches it.
                    _note(base).unlink(missing_ok=True)
                    raise WeightsRejected(
                        f"{manifest.policy}: model and adapters add up to other weights ({digest})"
                    )
            _note(image).write_text(digest, encoding="utf-8")
        except OSError as error:
            raise WeightsRejected(
                f"{manifest.policy}: its image cannot be written to {self._place} ({error}); with LoRA the actor's "
                "/dev/shm needs memory for twice the weights, and the adapters"
            ) from None

    def _count_bytes(self, size: int) -> None:
        self._metrics.count("weights_received_bytes_total", size, form="base")


def _write_merged(base: Path, adapters: Path, out: Path) -> str:
    """Write the sum of a frozen model and adapters; return its digest."""
    with out.open("w+b") as file, base.open("rb") as frozen, adapters.open("rb") as factors:
        size = os.fstat(frozen.fileno()).st_size
        # All of it now: a file system that is full later would end the actor inside a memory map, with SIGBUS.
        os.posix_fallocate(file.fileno(), 0, size)
        model, added = (
            mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ) for source in (frozen, factors)
        )
        merged = mmap.mmap(file.fileno(), size)
        merge_adapters(model, added, merged)
        return xxhash.xxh3_128_hexdigest(merged)


def _note(file: Path) -> Path:
    return file.with_suffix(".digest")


def _read_note(file: Path) -> str | None:
    """Return the digest that a file was verified to have, or None."""
    try:
        return _note(file).read_text(encoding="utf-8") if file.is_file() else None
    except OSError:
        return None
