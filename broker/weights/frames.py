"""Key frames: a safetensors file, sent through the weights stream in chunks and verified before anyone loads it.

Place in the flow: **Version** → actors. The file is mapped, never held in memory. Each chunk carries its offset, so
chunks may be stored in any order.
"""

import asyncio
import contextlib
import mmap
import os
import stat
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import BinaryIO

import xxhash

from horizonrl.broker.api import Message, Reader, Stream, Transport
from horizonrl.common.errors import WeightsDamaged, WeightsRejected
from horizonrl.common.files import atomic_write_text
from horizonrl.common.state import SentFile, WeightsManifest
from horizonrl.common.types import PolicyVersion

FRAME = "weights.frame"
BASE = "weights.base"
"""A frozen model, to which adapters are added: a frame of its own, for it outlives the versions."""
OFFSET = "Horizon-Offset"
POLICY = "Horizon-Policy"
CHUNK_BYTES = 2 << 20
PUBLISHED_AT_ONCE = 8
"""Chunks in flight: 2 MB chunks came to 350-570 MB/s with 8 (1 alone: 220-290)."""
FETCH_WAIT_S = 30.0
"""Chunks are stored before their manifest. So a chunk that does not come within this time is not in the stream."""
MIRROR_POLL_S = 0.05
"""Between two looks at a mirror that is behind."""
DIGEST_BYTES = 8 << 20
"""Bytes of a file that are in memory while it is digested."""


async def publish_frame(
    transport: Transport, file: Path, policy: PolicyVersion, digest: str, subject: str = FRAME
) -> WeightsManifest:
    """Store the file's bytes in the weights stream; return the manifest to announce under the key `policy`."""
    with (
        file.open("rb") as source,
        mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
    ):
        size = len(mapped)
        sequences = await publish_chunks(
            transport, subject, mapped, "b" if subject == BASE else "w", policy, {}
        )
    return WeightsManifest(
        policy=policy,
        weights_bytes=size,
        digest=digest,
        chunks=len(sequences),
        first_sequence=min(sequences),
        last_sequence=max(sequences),
    )


async def publish_chunks(
    transport: Transport,
    subject: str,
    data: bytes | mmap.mmap,
    prefix: str,
    policy: PolicyVersion,
    headers: Mapping[str, str],
) -> list[int]:
    """Store a version's bytes as messages of `subject`, each with its offset; return their sequences.

    Not in order: chunks are stored as they come, and one that had been stored before keeps its old sequence. `prefix`
    begins the message ids.
    """
    step = min(CHUNK_BYTES, transport.max_payload_bytes)
    slots = asyncio.Semaphore(PUBLISHED_AT_ONCE)

    async def publish(index: int) -> int:
        # The slice copies its chunk, so it is made inside: only the chunks in flight are in memory.
        async with slots:
            stored = await transport.publish(
                subject,
                data[index * step : (index + 1) * step],
                # With the lineage: a learner that resumed may reach the same version with other weights.
                message_id=f"{prefix}-{policy.lineage}-{policy.version}-{index}",
                headers={**headers, POLICY: str(policy), OFFSET: str(index * step)},
            )
        return stored.sequence

    async with asyncio.TaskGroup() as group:
        chunks = [group.create_task(publish(index)) for index in range(-(-len(data) // step))]
    return [chunk.result() for chunk in chunks]


def shared_frame(manifest: WeightsManifest, shared_dir: Path | None) -> Path | None:
    """Return the announced file if it is in `shared_dir` and has the announced bytes; reads all of it.

    A manifest comes from another program and is not trusted: only regular files in `shared_dir` are opened for it.
    """
    shared = _within(shared_dir, manifest.path)
    return shared if shared is not None and _verify(shared, manifest) else None


async def fetch_frame(
    transport: Transport,
    manifest: SentFile,
    into: Path,
    received: Callable[[int], None] = lambda _: None,
    subject: str = FRAME,
) -> Path:
    """Write the announced frame to `into`, verified by size and digest; return it.

    A call that fails leaves what it has received next to `into`, and the next one goes on from there. `received` is
    told the bytes of each message. Raises WeightsDamaged if the stream does not hold them, WeightsRejected if they
    cannot be had for another reason, and LogGap if a newer frame has replaced them.
    """
    if not manifest.chunks:
        raise WeightsRejected(
            f"{manifest.policy} is announced as the file {manifest.path}, which is not on this host, not the one "
            "announced, or not in the folder that this actor shares; turn broker.shared_files off at the learner, or "
            "turn it on at every actor, with the learner's run directory under the same run.root"
        )
    try:
        await _fetch(transport, manifest, into, received, subject)
    except FileNotFoundError as error:
        # Of one that was stopped, and taken for dead, when it wakes.
        raise WeightsRejected(
            f"{manifest.policy}: another actor of this host fetches it too ({error})"
        ) from None
    return into


async def _fetch(
    transport: Transport,
    manifest: SentFile,
    into: Path,
    received: Callable[[int], None],
    subject: str,
) -> None:
    partial = into.with_name(f".{into.name}.part")
    progress = into.with_name(f".{into.name}.progress")
    # In threads, here and below: the event loop extends leases, and writing or reading a frame would hold it up.
    after = await asyncio.to_thread(_resume, partial, progress, manifest)
    with partial.open("r+b") as target:
        async with reading(transport, manifest.last_sequence, after, subject) as reader:
            await _fetch_chunks(reader, manifest, target, after, progress, received)
    if not await asyncio.to_thread(_verify, partial, manifest):
        for file in (partial, progress):
            file.unlink(missing_ok=True)
        raise WeightsDamaged(
            f"{manifest.policy}: the bytes received are not the ones announced, or not all of its {manifest.chunks} "
            "chunks are in the stream"
        )
    # Only a verified file ever has the final name.
    os.replace(partial, into)
    progress.unlink(missing_ok=True)


def _resume(partial: Path, progress: Path, manifest: SentFile) -> int:
    """Return the sequence up to which a frame has been received; begin it anew unless it is this one."""
    with contextlib.suppress(OSError, ValueError):
        digest, after = progress.read_text(encoding="utf-8").split()
        if digest == manifest.digest and partial.stat().st_size == manifest.weights_bytes:
            # A frozen model that is sent again has the same digest at later places, and the old ones are purged.
            return max(int(after), manifest.first_sequence - 1)
    progress.unlink(missing_ok=True)
    try:
        with partial.open("wb") as target:
            # All of it now: a file system that is full later would end the actor inside a memory map, with SIGBUS.
            os.posix_fallocate(target.fileno(), 0, manifest.weights_bytes)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise WeightsRejected(
            f"{manifest.policy}: no room for its {manifest.weights_bytes} bytes in {partial.parent} ({error}); give "
            "the actor's /dev/shm more memory"
        ) from None
    return manifest.first_sequence - 1


async def _fetch_chunks(
    reader: Reader,
    manifest: SentFile,
    target: BinaryIO,
    after: int,
    progress: Path,
    received: Callable[[int], None],
) -> None:
    """Write the chunks of a frame that follow sequence `after` at their offsets, until there are no more."""
    # By position and not by number of chunks: those that were received before `after` are not counted here, and only
    # the digest tells whether all have come.
    while after < manifest.last_sequence:
        messages = await reader.fetch(PUBLISHED_AT_ONCE, FETCH_WAIT_S)
        if not messages:
            raise WeightsDamaged(
                f"{manifest.policy}: its chunks after {after} are not in the stream"
            )
        # A learner that was replaced may have stored chunks of its own frame in between.
        ours = [
            message for message in messages if message.headers.get(POLICY) == str(manifest.policy)
        ]
        chunks = {_offset(message, manifest): message.data for message in ours}
        after = messages[-1].sequence
        await asyncio.to_thread(
            _write_chunks, target, chunks, progress, f"{manifest.digest} {after}"
        )
        received(sum(len(message.data) for message in messages))


@asynccontextmanager
async def reading(
    transport: Transport, until: int, after: int, subject: str
) -> AsyncIterator[Reader]:
    """Read the weights stream, which holds the message `until` or is about to: a mirror of it may be behind."""
    deadline = asyncio.get_running_loop().time() + FETCH_WAIT_S
    while (await transport.extent(Stream.WEIGHTS)).last_sequence < until:
        if asyncio.get_running_loop().time() > deadline:
            raise WeightsRejected(
                f"the weights stream does not hold message {until}, which the learner has announced: if this broker "
                "mirrors another one, look at the mirror's lag"
            )
        await asyncio.sleep(MIRROR_POLL_S)
    reader = await transport.reader(Stream.WEIGHTS, after, subject)
    try:
        yield reader
    finally:
        await reader.close()


def _offset(message: Message, manifest: SentFile) -> int:
    text = message.headers.get(OFFSET, "")
    # Checked before it is written: an offset far beyond the frame would make a file of that size.
    offset = int(text) if text.isdecimal() and len(text) < 16 else manifest.weights_bytes
    if offset + len(message.data) > manifest.weights_bytes:
        raise WeightsDamaged(
            f"{manifest.policy}: a chunk at offset {text!r} lies outside of the frame"
        )
    return offset


def _write_chunks(target: BinaryIO, chunks: Mapping[int, bytes], progress: Path, line: str) -> None:
    for offset, data in chunks.items():
        os.pwrite(target.fileno(), data, offset)
    # After the chunks: what a killed reader has noted is written.
    atomic_write_text(progress, line)


async def discard_frames_below(transport: Transport, manifest: SentFile) -> None:
    """Remove what is older than a frame."""
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


def _verify(path: Path, manifest: SentFile) -> bool:
    """Return whether a regular file has the announced bytes; reading a device or a pipe might never end."""
    try:
        status = path.stat()
        same_size = stat.S_ISREG(status.st_mode) and status.st_size == manifest.weights_bytes
        return same_size and digest_file(path) == manifest.digest
    except (OSError, ValueError):
        return False
