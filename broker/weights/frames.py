"""Key frames: a safetensors file, sent through the weights stream in chunks and verified before anyone loads it.

Place in the flow: **Version** → actors. The file is mapped, never held in memory. Each chunk carries its offset, so
chunks may be stored in any order.
"""

import asyncio
import contextlib
import mmap
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import xxhash

from horizonrl.broker.api import Message, Stream, Transport
from horizonrl.common.errors import WeightsRejected
from horizonrl.common.state import WeightsManifest
from horizonrl.common.types import PolicyVersion

FRAME = "weights.frame"
OFFSET = "Horizon-Offset"
POLICY = "Horizon-Policy"
CHUNK_BYTES = 2 << 20
PUBLISHED_AT_ONCE = 8
"""Chunks in flight: 2 MB chunks came to 350-570 MB/s with 8 (1 alone: 220-290)."""
FETCH_WAIT_S = 30.0
"""Chunks are stored before their manifest. So a chunk that does not come within this time is not in the stream."""
DIGEST_BYTES = 8 << 20
"""Bytes of a file that are in memory while it is digested."""


async def publish_frame(transport: Transport, file: Path, policy: PolicyVersion, digest: str) -> WeightsManifest:
    """Store the file's bytes in the weights stream; return the manifest to announce under the key `policy`."""
    step = min(CHUNK_BYTES, transport.max_payload_bytes)
    slots = asyncio.Semaphore(PUBLISHED_AT_ONCE)

    async def publish(index: int) -> int:
        # The slice copies its chunk, so it is made inside: only the chunks in flight are in memory.
        async with slots:
            stored = await transport.publish(
                FRAME,
                mapped[index * step : (index + 1) * step],
                # With the lineage: a learner that resumed may reach the same version with other weights.
                message_id=f"w-{policy.lineage}-{policy.version}-{index}",
                headers={POLICY: str(policy), OFFSET: str(index * step)},
            )
        return stored.sequence

    with file.open("rb") as source, mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        size = len(mapped)
        async with asyncio.TaskGroup() as group:
            chunks = [group.create_task(publish(index)) for index in range(-(-size // step))]
    # Not in order: chunks are stored as they come, and one that had been stored before keeps its old sequence.
    sequences = [chunk.result() for chunk in chunks]
    return WeightsManifest(
        policy=policy,
        weights_bytes=size,
        digest=digest,
        chunks=len(chunks),
        first_sequence=min(sequences),
        last_sequence=max(sequences),
    )


async def fetch_frame(
    transport: Transport, manifest: WeightsManifest, into: Path, shared_dir: Path | None = None
) -> Path:
    """Return a file with the announced weights, verified by size and digest: the shared file, else `into`.

    A manifest comes from another program and is not trusted: only regular files in `shared_dir` are opened for it.
    Raises WeightsRejected if the weights cannot be had, and LogGap if a newer frame has replaced them.
    """
    shared = _within(shared_dir, manifest.path)
    # In a thread: the event loop extends leases, and reading a whole frame would hold it up.
    if shared is not None and await asyncio.to_thread(_verified, shared, manifest):
        return shared
    if not manifest.chunks:
        raise WeightsRejected(
            f"{manifest.policy} is announced as the file {manifest.path}, which is not on this host, not the one "
            f"announced, or not in the shared folder ({shared_dir}); turn broker.shared_files off at the learner, or "
            "turn it on at every actor, with the learner's run directory under the same run.root"
        )
    # Under a name of its own, since other actors on this machine may fetch the same version.
    partial = into.with_name(f".{into.name}.{os.getpid()}")
    try:
        with partial.open("wb") as target:
            await _fetch_chunks(transport, manifest, target)
        if not await asyncio.to_thread(_verified, partial, manifest):
            raise WeightsRejected(f"{manifest.policy}: the bytes received are not the ones announced")
        # Only a verified file ever has the final name.
        os.replace(partial, into)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(partial)
    return into


async def _fetch_chunks(transport: Transport, manifest: WeightsManifest, target: BinaryIO) -> None:
    """Write every chunk of a frame at its offset; a chunk that was stored twice is written once."""
    reader = await transport.reader(Stream.WEIGHTS, manifest.first_sequence - 1, FRAME)
    written: set[int] = set()
    try:
        while len(written) < manifest.chunks:
            messages = await reader.fetch(PUBLISHED_AT_ONCE, FETCH_WAIT_S)
            # A learner that was replaced may have stored chunks of its own frame in between.
            ours = [message for message in messages if message.headers.get(POLICY) == str(manifest.policy)]
            chunks = {_offset(message, manifest): message.data for message in ours}
            await asyncio.to_thread(
                _write_chunks, target, {offset: chunks[offset] for offset in chunks.keys() - written}
            )
            written |= chunks.keys()
            # The manifest is set after its chunks, so what is not there now does not come later.
            if not messages or (len(written) < manifest.chunks and messages[-1].sequence >= manifest.last_sequence):
                missing = manifest.chunks - len(written)
                raise WeightsRejected(f"{manifest.policy}: {missing} of {manifest.chunks} chunks are not in the stream")
    finally:
        await reader.close()


def _offset(message: Message, manifest: WeightsManifest) -> int:
    text = message.headers.get(OFFSET, "")
    # Checked before it is written: an offset far beyond the frame would make a file of that size.
    offset = int(text) if text.isdecimal() and len(text) < 16 else manifest.weights_bytes
    if offset + len(message.data) > manifest.weights_bytes:
        raise WeightsRejected(f"{manifest.policy}: a chunk at offset {text!r} lies outside of the frame")
    return offset


def _write_chunks(target: BinaryIO, chunks: Mapping[int, bytes]) -> None:
    for offset, data in chunks.items():
        os.pwrite(target.fileno(), data, offset)


async def discard_frames_below(transport: Transport, manifest: WeightsManifest) -> None:
    """Remove the frames older than the manifest's."""
    # An actor that still reads an older frame gets a LogGap, and then fetches the newer one.
    await transport.purge(Stream.WEIGHTS, below=manifest.first_sequence)


def digest_file(path: Path) -> str:
    """Return the xxh3_128 of a file's bytes, as hexadecimal."""
    # It finds damage, not malice: xxh3 is not a cryptographic hash (threat model).
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(DIGEST_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def _within(folder: Path | None, path: str | None) -> Path | None:
    """Return the file that `path` names if it is directly in `folder`, after resolving links."""
    if folder is None or path is None:
        return None
    try:
        file = Path(os.path.realpath(path))
    except ValueError:  # a null character
        return None
    return file if file.parent == Path(os.path.realpath(folder)) else None


def _verified(path: Path, manifest: WeightsManifest) -> bool:
    """Return whether a regular file has the announced bytes; reading a device or a pipe might never end."""
    try:
        found = path.stat()
        same_size = stat.S_ISREG(found.st_mode) and found.st_size == manifest.weights_bytes
        return same_size and digest_file(path) == manifest.digest
    except (OSError, ValueError):
        return False
