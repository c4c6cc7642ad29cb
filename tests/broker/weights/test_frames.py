import asyncio
import os
from dataclasses import replace
from pathlib import Path

import pytest

from horizonrl.broker.api import Stream
from horizonrl.broker.memory import MemoryServer, MemoryTransport
from horizonrl.broker.weights import frames
from horizonrl.broker.weights.frames import (
    digest_file,
    discard_frames_below,
    fetch_frame,
    publish_frame,
    shared_frame,
)
from horizonrl.common.errors import BrokerUnreachable, LogGap, WeightsRejected
from horizonrl.common.state import WeightsManifest
from horizonrl.common.types import PolicyVersion
from tests.brokers import Broker

FRAME_BYTES = 20_000_003
"""Ten chunks, the last one short."""


def make_file(path: Path, size: int = FRAME_BYTES) -> tuple[Path, str]:
    path.write_bytes(os.urandom(size))
    return path, digest_file(path)


@pytest.fixture
def frame(tmp_path: Path) -> tuple[Path, str]:
    return make_file(tmp_path / "frame.safetensors", 5_000)


@pytest.fixture
def small() -> MemoryTransport:
    """A transport whose messages hold a kilobyte."""
    return MemoryTransport(MemoryServer(max_payload_bytes=1_024))


async def test_a_frame_of_20_mb_comes_back_as_it_was(broker: Broker, tmp_path: Path) -> None:
    file, digest = make_file(tmp_path / "frame")
    async with broker.open() as learner, broker.open() as actor:
        manifest = await publish_frame(learner, file, PolicyVersion(version=3), digest)
        assert (manifest.chunks, manifest.weights_bytes) == (10, FRAME_BYTES)
        assert (manifest.first_sequence, manifest.last_sequence) == (1, 10)
        fetched = await fetch_frame(actor, manifest, tmp_path / "fetched")
        assert fetched == tmp_path / "fetched"
        assert fetched.read_bytes() == file.read_bytes()


async def test_an_older_frame_is_discarded_and_the_newer_one_stays(
    broker: Broker, tmp_path: Path
) -> None:
    async with broker.open() as transport:
        manifests = []
        for version in range(3):
            file, digest = make_file(tmp_path / f"frame-{version}", 5_000)
            manifests.append(
                await publish_frame(transport, file, PolicyVersion(version=version), digest)
            )
        await discard_frames_below(transport, manifests[1])
        assert (await transport.extent(Stream.WEIGHTS)).messages == 2
        await fetch_frame(transport, manifests[2], tmp_path / "fetched")
        with pytest.raises(LogGap):
            await fetch_frame(transport, manifests[0], tmp_path / "fetched")


async def test_a_frame_whose_chunks_were_stored_twice_is_fetched(
    small: MemoryTransport, frame: tuple[Path, str], tmp_path: Path
) -> None:
    ids = small.server.runs["run"].streams[Stream.WEIGHTS].ids
    first = await publish_frame(small, frame[0], PolicyVersion(version=1), frame[1])
    ids.clear()  # the server no longer knows them, as after an hour
    again = await publish_frame(small, frame[0], PolicyVersion(version=1), frame[1])
    assert again.first_sequence > first.last_sequence
    for manifest in (first, again, again.model_copy(update={"first_sequence": 1})):
        fetched = await fetch_frame(small, manifest, tmp_path / "fetched")
        assert fetched.read_bytes() == frame[0].read_bytes()

    chunk = await small.last(Stream.WEIGHTS, "weights.frame")
    assert chunk is not None
    manifest = first.model_copy(update={"first_sequence": again.last_sequence})
    for _ in range(first.chunks - 1):
        await small.publish(chunk.subject, chunk.data, headers=chunk.headers)
    # One chunk five times is no frame.
    with pytest.raises(WeightsRejected, match="not all of its 5 chunks"):
        await fetch_frame(small, manifest, tmp_path / "fetched")


async def test_frames_of_two_versions_may_interleave(
    small: MemoryTransport, tmp_path: Path
) -> None:
    files = [make_file(tmp_path / f"frame-{version}", 5_000) for version in range(2)]
    manifests = await asyncio.gather(
        *(
            publish_frame(small, file, PolicyVersion(version=v), digest)
            for v, (file, digest) in enumerate(files)
        )
    )
    for manifest, (file, _) in zip(manifests, files, strict=True):
        fetched = await fetch_frame(small, manifest, tmp_path / "fetched")
        assert fetched.read_bytes() == file.read_bytes()


async def test_a_corrupted_chunk_is_rejected_and_leaves_no_file(
    small: MemoryTransport, frame: tuple[Path, str], tmp_path: Path
) -> None:
    manifest = await publish_frame(small, frame[0], PolicyVersion(version=1), frame[1])
    held = small.server.runs["run"].streams[Stream.WEIGHTS].messages
    chunk = held[2]
    held[2] = replace(chunk, data=bytes(1_024))
    with pytest.raises(WeightsRejected, match=r"v1\.l0"):
        await fetch_frame(small, manifest, tmp_path / "fetched")
    assert os.listdir(tmp_path) == [frame[0].name]


@pytest.mark.parametrize("offset", ["5000", "-1", "x", "", "99999999999999999999"])
async def test_a_chunk_outside_of_its_frame_is_rejected(
    small: MemoryTransport, frame: tuple[Path, str], tmp_path: Path, offset: str
) -> None:
    policy = PolicyVersion(version=1)
    await small.publish(
        "weights.frame", b"x", headers={"Horizon-Policy": "v1.l0", "Horizon-Offset": offset}
    )
    manifest = await publish_frame(small, frame[0], policy, frame[1])
    with pytest.raises(WeightsRejected, match="outside"):
        await fetch_frame(
            small, manifest.model_copy(update={"first_sequence": 1}), tmp_path / "fetched"
        )


async def test_a_missing_chunk_is_rejected_without_waiting_for_it(
    small: MemoryTransport, frame: tuple[Path, str], tmp_path: Path
) -> None:
    manifest = await publish_frame(small, frame[0], PolicyVersion(version=1), frame[1])
    del small.server.runs["run"].streams[Stream.WEIGHTS].messages[3]
    async with asyncio.timeout(5.0):
        with pytest.raises(WeightsRejected, match="not all of its 5 chunks"):
            await fetch_frame(small, manifest, tmp_path / "fetched")


def test_a_shared_file_is_used_when_it_is_the_one_announced(frame: tuple[Path, str]) -> None:
    file, digest = frame
    manifest = WeightsManifest(
        policy=PolicyVersion(), weights_bytes=5_000, digest=digest, path=str(file)
    )
    assert shared_frame(manifest, file.parent) == file
    assert shared_frame(manifest, None) is None  # unless the actor shares no folder
    file.write_bytes(b"overwritten")
    assert shared_frame(manifest, file.parent) is None


def test_a_frame_that_is_only_a_file_is_not_fetched(small: MemoryTransport, tmp_path: Path) -> None:
    manifest = WeightsManifest(
        policy=PolicyVersion(), weights_bytes=1, digest="d", path="/elsewhere/frame"
    )
    with pytest.raises(WeightsRejected, match=r"/elsewhere/frame.*shared_files"):
        asyncio.run(fetch_frame(small, manifest, tmp_path / "fetched"))


def test_a_manifest_names_no_file_but_a_regular_one_of_the_shared_folder(tmp_path: Path) -> None:
    folder, outside = tmp_path / "weights", tmp_path / "secret"
    folder.mkdir()
    outside.write_bytes(b"")
    (folder / "link").symlink_to(outside)
    (folder / "zero").symlink_to("/dev/zero")
    os.mkfifo(folder / "pipe")
    (folder / "below").mkdir()
    paths = ["/dev/zero", "/dev/stdin", str(outside), f"{folder}/../secret", "a\0b"]
    for path in [
        *paths,
        *(str(folder / name) for name in ("link", "zero", "pipe", "below", "absent")),
    ]:
        manifest = WeightsManifest(
            policy=PolicyVersion(), weights_bytes=0, digest=digest_file(outside), path=path
        )
        assert shared_frame(manifest, folder) is None


async def test_a_fetch_that_is_cut_off_goes_on_with_the_chunks_that_are_missing(
    small: MemoryTransport, frame: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "PUBLISHED_AT_ONCE", 1)
    sizes: list[int] = []

    def cut_off(size: int) -> None:
        sizes.append(size)
        if len(sizes) == 3:
            raise BrokerUnreachable("the line is cut")

    manifest = await publish_frame(small, frame[0], PolicyVersion(version=1), frame[1])
    with pytest.raises(BrokerUnreachable):
        await fetch_frame(small, manifest, tmp_path / "fetched", cut_off)
    fetched = await fetch_frame(small, manifest, tmp_path / "fetched", sizes.append)
    assert fetched.read_bytes() == frame[0].read_bytes()
    assert sum(sizes) == 5_000, "no chunk was fetched twice"
    assert sorted(os.listdir(tmp_path)) == ["fetched", frame[0].name]


async def test_publishing_a_frame_again_stores_nothing_twice(
    small: MemoryTransport, frame: tuple[Path, str]
) -> None:
    first = await publish_frame(small, frame[0], PolicyVersion(version=2, lineage=1), frame[1])
    assert (
        await publish_frame(small, frame[0], PolicyVersion(version=2, lineage=1), frame[1]) == first
    )
    assert (await small.extent(Stream.WEIGHTS)).messages == first.chunks
