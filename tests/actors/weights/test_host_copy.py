"""The shadow: whatever was seen, skipped, purged, damaged or cut off, an engine loads exactly what was announced."""

import asyncio
import fcntl
import os
import random
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from horizonrl.actors.weights import host_copy as shadow_module
from horizonrl.actors.weights.host_copy import (
    FETCHING,
    IMAGE,
    MARKER,
    NOTES_KEPT,
    PATCHED,
    READING,
    Shadow,
)
from horizonrl.actors.weights.words import compare
from horizonrl.broker.api import Stream
from horizonrl.broker.memory import MemoryServer, MemoryTransport
from horizonrl.broker.weights import chain, frames
from horizonrl.broker.weights.chain import CHANGES
from horizonrl.broker.weights.frames import digest_file
from horizonrl.common.errors import BrokerError, WeightsRejected
from horizonrl.common.state import SentFile
from horizonrl.common.types import PolicyVersion
from horizonrl.learner.loop import weights_publisher as learner_weights
from tests.weights import RandomLearner, ShadowHost, lose_patience, shrink


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch)
    lose_patience(monkeypatch)


pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture
def small() -> MemoryTransport:
    return MemoryTransport(MemoryServer(), "run")


@pytest.fixture
def learner(small: MemoryTransport, tmp_path: Path) -> RandomLearner:
    return RandomLearner(small, tmp_path / "weights")


@pytest.fixture
def host(small: MemoryTransport, tmp_path: Path) -> ShadowHost:
    return ShadowHost(small, tmp_path / "shadow")


@pytest.mark.parametrize("seed", range(2))
async def test_any_subset_of_versions_and_purges_gives_exact_weights(
    small: MemoryTransport, tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)

    learner = RandomLearner(small, tmp_path / "weights")
    hosts = [ShadowHost(small, tmp_path / f"host{n}") for n in range(4)]
    loaded = 0
    for _ in range(40):
        if chance.random() < 0.1:  # a learner that resumed, a few versions back
            back = max(0, learner.version - chance.randrange(5))
            learner = RandomLearner(small, tmp_path / "weights", learner.lineage + 1, back)
        # Now and then everything changes: then a key frame takes less than the changes.
        manifest = await learner.step(share=1.0 if chance.random() < 0.1 else 0.02)
        for host in hosts:
            if chance.random() < 0.3:
                assert await host.load(manifest) == learner.images[manifest.policy]
                loaded += 1
    assert loaded > 20
    extent = await small.extent(Stream.WEIGHTS)
    assert extent.stored_bytes < 5 * manifest.weights_bytes, "what nobody needs is purged"


async def test_an_actor_that_slept_ten_versions_applies_changes_and_loads_once(
    learner: RandomLearner, host: ShadowHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learner_weights, "LONGEST_CHAIN", 64)

    await host.load(await learner.step())
    for _ in range(10):
        manifest = await learner.step(share=0.005)
    assert await host.load(manifest) == learner.images[manifest.policy]
    assert host.received("frame") == manifest.weights_bytes


async def test_a_resumed_learner_with_the_same_weights_sends_an_actor_nothing(
    small: MemoryTransport, tmp_path: Path, learner: RandomLearner, host: ShadowHost
) -> None:
    await host.load(await learner.step())
    successor = RandomLearner(small, tmp_path / "weights", lineage=1, start=1)
    successor.words = learner.words
    manifest = await successor.publish()
    assert await host.load(manifest) == learner.images[PolicyVersion(version=1)]
    assert (
        await host.load(await successor.step())
        == successor.images[PolicyVersion(version=2, lineage=1)]
    )
    assert host.received("frame") == manifest.weights_bytes


async def test_the_image_of_a_lost_future_is_not_changed_into_a_version_of_the_same_lineage(
    small: MemoryTransport, tmp_path: Path, learner: RandomLearner, host: ShadowHost
) -> None:
    """Broker and run directory went back; this host was cut off, and its image has a name that is used again."""

    for _ in range(2):
        await host.load(await learner.step())
    again = RandomLearner(small, tmp_path / "again", start=1)
    again.random = np.random.default_rng(7)
    held = small.server.runs["run"].streams[Stream.WEIGHTS]
    held.ids.clear()  # as those of a restored broker
    for _ in range(3):
        manifest = await again.step(share=0.001)
    assert await host.load(manifest) == again.images[manifest.policy]


async def test_what_a_replaced_learner_still_stores_is_passed_over(
    small: MemoryTransport, tmp_path: Path, learner: RandomLearner, host: ShadowHost
) -> None:
    await host.load(await learner.step())
    successor = RandomLearner(small, tmp_path / "other", lineage=1)
    await host.load(await successor.step())
    # It announces nothing that counts: its fence is its own matter (test_fence.py)
    await learner.step()
    manifest = await successor.step()
    assert await host.load(manifest) == successor.images[manifest.policy]


@pytest.mark.parametrize("damage", ["data", "missing", "headers", "digest"])
async def test_damaged_changes_are_not_applied_and_the_next_key_frame_is(
    small: MemoryTransport, learner: RandomLearner, host: ShadowHost, damage: str
) -> None:
    await host.load(await learner.step())
    manifest = await learner.step()
    held = small.server.runs["run"].streams[Stream.WEIGHTS].messages
    message = held[manifest.last_change]
    assert message.subject == CHANGES
    if damage == "missing":
        del held[message.sequence]
    else:
        headers = {"headers": {}, "digest": message.headers | {chain.DIGEST: "0" * 32}}.get(
            damage, message.headers
        )
        data = bytes(len(message.data)) if damage == "data" else message.data
        held[message.sequence] = replace(message, headers=headers, data=data)
    with pytest.raises((WeightsRejected, BrokerError)):
        await host.load(manifest)
    while (manifest := await learner.step()).key_policy != manifest.policy:
        continue
    assert await host.load(manifest) == learner.images[manifest.policy]


class Killed(BaseException):
    """The process is gone."""


@pytest.mark.parametrize("point", ["before", "doubt", "half", "written", "marked"])
async def test_a_patcher_killed_at_any_point_leaves_a_state_that_the_next_one_recognises(
    learner: RandomLearner, host: ShadowHost, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    await host.load(await learner.step())
    manifest = await learner.step(share=0.1)
    decode = shadow_module.decode_changes
    mark = Shadow._mark

    class Dying:
        def __init__(self, target: object, data: bytes) -> None:
            self.decoded = decode(target, data)
            if point == "before":
                raise Killed

        def write(self, target: "memoryview") -> None:
            if point == "doubt":
                raise Killed
            before = bytes(target)
            self.decoded.write(target)
            if point == "half":
                middle = len(before) // 2
                target[middle:] = before[middle:]
                raise Killed
            if point == "written":
                raise Killed

    def dying_mark(shadow: Shadow, *arguments: object) -> None:
        mark(shadow, *arguments)  # type: ignore[arg-type]
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(shadow_module, "decode_changes", Dying)
        if point == "marked":
            patched.setattr(Shadow, "_mark", dying_mark)
        with pytest.raises(Killed):
            await host.load(manifest)
    fetched = host.received("frame")
    assert await host.load(manifest) == learner.images[manifest.policy]
    assert (host.received("frame") > fetched) == (point == "half"), (
        "only a torn image needs a key frame"
    )


async def test_actors_of_one_host_download_once(small: MemoryTransport, tmp_path: Path) -> None:
    learner = RandomLearner(small, tmp_path / "weights")
    hosts = [ShadowHost(small, tmp_path / "shadow") for _ in range(8)]
    for _ in range(4):
        manifest = await learner.step()
        results = await asyncio.gather(*(host.load(manifest) for host in hosts))
        assert set(results) == {learner.images[manifest.policy]}
    assert sum(host.received("frame") for host in hosts) == manifest.weights_bytes
    sent = sum(
        len(m.data) for m in small.server.runs["run"].streams[Stream.WEIGHTS].messages.values()
    )
    assert sum(host.received("changes") for host in hosts) == sent - manifest.weights_bytes
    names = {entry.name for entry in (tmp_path / "shadow").iterdir()}
    assert names == {IMAGE, MARKER, PATCHED, FETCHING}, "one image, and nothing left of readers"


async def test_an_actor_that_asks_for_an_older_version_gets_none_and_does_not_move_the_image_back(
    learner: RandomLearner, host: ShadowHost
) -> None:
    older = await learner.step()
    newer = await learner.step()
    await host.load(newer)
    with pytest.raises(WeightsRejected, match="overtaken"):
        await host.load(older)
    received = host.received("frame")
    assert await host.load(newer) == learner.images[newer.policy]
    assert host.received("frame") == received


async def test_a_newer_image_of_a_run_that_was_begun_anew_is_replaced(
    tmp_path: Path, learner: RandomLearner, host: ShadowHost
) -> None:
    for _ in range(3):
        await host.load(await learner.step())
    again = RandomLearner(MemoryTransport(MemoryServer(), "run"), tmp_path / "again")
    manifest = await again.step()
    other = ShadowHost(again.transport, tmp_path / "shadow")
    assert await other.load(manifest) == again.images[manifest.policy]


@pytest.mark.parametrize("name", [IMAGE, FETCHING])
async def test_an_actor_that_is_stopped_with_a_lock_does_not_stop_the_others(
    learner: RandomLearner, host: ShadowHost, name: str
) -> None:
    await host.load(await learner.step())
    held = os.open(host.place / name, os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_SH)
    manifest = await learner.step()
    assert await host.load(manifest) == learner.images[manifest.policy]
    os.close(held)
    assert await host.load(await learner.step())


@pytest.mark.parametrize("lineage", [0, 1])
async def test_an_engine_finds_its_file_while_another_actor_replaces_the_image(
    small: MemoryTransport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lineage: int
) -> None:
    monkeypatch.setattr(shadow_module, "beating", lambda _: nullcontext())  # its actor is stopped

    learner = RandomLearner(small, tmp_path / "weights")
    hosts = [ShadowHost(small, tmp_path / "shadow") for _ in range(2)]
    first = await learner.step()
    async with hosts[0].shadow.holding(first) as file:
        if lineage:
            learner = RandomLearner(small, tmp_path / "other", lineage)
        newer = await learner.step()
        assert await hosts[1].load(newer) == learner.images[newer.policy]
        # By its name: vLLM's workers open the file some time after they are told to.
        assert digest_file(file) == first.digest
    assert not file.exists()
    assert await hosts[0].load(await learner.step())


async def test_an_actor_waits_for_one_that_loads_and_lives(
    small: MemoryTransport, tmp_path: Path
) -> None:
    learner = RandomLearner(small, tmp_path / "weights")
    hosts = [ShadowHost(small, tmp_path / "shadow") for _ in range(2)]
    first = await learner.step()
    async with hosts[0].shadow.holding(first):
        newer = await learner.step(share=0.02)
        loading = asyncio.create_task(hosts[1].load(newer))
        await asyncio.sleep(3 * shadow_module.STUCK_S)
        assert not loading.done()
    assert await loading == learner.images[newer.policy]
    assert hosts[1].received("frame") == 0, "the changes did, once the image was free"


async def test_an_actor_whose_work_takes_long_is_not_taken_for_a_stopped_one(
    small: MemoryTransport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frame of 140 GB is allocated, and digested, for longer than `STUCK_S`: in a thread, without a message."""
    verified = frames._verify

    def slowly(path: Path, manifest: SentFile) -> bool:
        time.sleep(3 * shadow_module.STUCK_S)
        return verified(path, manifest)

    monkeypatch.setattr(frames, "_verify", slowly)

    learner = RandomLearner(small, tmp_path / "weights")
    hosts = [ShadowHost(small, tmp_path / "shadow") for _ in range(3)]
    manifest = await learner.step()
    loaded = await asyncio.gather(*(host.load(manifest) for host in hosts))
    assert set(loaded) == {learner.images[manifest.policy]}
    assert sum(host.received("frame") for host in hosts) == manifest.weights_bytes


async def test_one_that_wakes_in_a_download_that_another_has_taken_over_tries_again(
    small: MemoryTransport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = await RandomLearner(small, tmp_path / "weights").step()
    image = tmp_path / IMAGE
    verified = frames._verify

    def taken(path: Path, manifest: SentFile) -> bool:
        os.replace(path, image)
        return verified(image, manifest)

    monkeypatch.setattr(frames, "_verify", taken)
    with pytest.raises(WeightsRejected, match="another actor of this host fetches it too"):
        await frames.fetch_frame(small, manifest, image)


@pytest.mark.parametrize("jump_s", [-3600, 3600])
def test_a_clock_that_is_set_wakes_nobody(tmp_path: Path, jump_s: int) -> None:
    file = tmp_path / FETCHING
    file.touch()
    silence = shadow_module.Silence(file)
    assert not silence.is_long()
    now = time.time() + jump_s
    os.utime(file, (now, now))  # what a living holder's next sign looks like
    assert not silence.is_long()
    time.sleep(1.2 * shadow_module.STUCK_S)
    assert silence.is_long()


async def test_a_name_that_a_killed_actor_left_is_removed(
    learner: RandomLearner, host: ShadowHost
) -> None:
    await host.load(await learner.step())
    os.link(host.place / IMAGE, host.place / f"{READING}left.safetensors")
    await host.load(await learner.step())
    assert {entry.name for entry in host.place.iterdir()} == {IMAGE, MARKER, PATCHED, FETCHING}


async def test_what_patches_wrote_leads_from_each_of_the_last_versions_to_the_image(
    small: MemoryTransport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learner_weights, "LONGEST_CHAIN", 64)

    learner = RandomLearner(small, tmp_path / "weights")
    host, other = (ShadowHost(small, tmp_path / "shadow", notes=True) for _ in range(2))
    files, digests = [], []
    for version in range(2 + NOTES_KEPT + 1):
        manifest = await learner.step(share=0.002)
        # In turns: the one finds what the other has noted.
        await (host if version % 2 else other).load(manifest)
        files.append(tmp_path / f"{version}.safetensors")
        files[-1].write_bytes(learner.images[manifest.policy])
        digests.append(manifest.digest)
    for back, (file, digest) in enumerate(zip(reversed(files), reversed(digests), strict=True)):
        noted, differ = (
            host.shadow.changed_since(digest, manifest.digest),
            compare(file, files[-1]),
        )
        assert differ is not None
        if back > NOTES_KEPT:
            assert noted is None, "an engine so far behind loads the whole image"
        else:
            assert noted is not None
            assert np.isin(differ, noted).all()
            assert len(noted) <= len(differ) + 2, "hardly a word changes back"
    assert len(list(host.place.glob("changed-*"))) == NOTES_KEPT


async def test_a_note_that_is_damaged_or_lost_and_a_new_key_frame_leave_the_whole_image(
    small: MemoryTransport, tmp_path: Path
) -> None:
    learner, host = (
        RandomLearner(small, tmp_path / "weights"),
        ShadowHost(small, tmp_path / "shadow", notes=True),
    )
    await host.load(await learner.step(share=0.005))
    second, third = [await learner.step(share=0.005) for _ in range(2)]
    await host.load(third)
    assert host.shadow.changed_since(second.digest, third.digest) is not None
    note = max(host.place.glob("changed-*"))
    note.write_bytes(note.read_bytes()[:-1])
    assert host.shadow.changed_since(second.digest, third.digest) is None
    note.unlink()
    assert host.shadow.changed_since(second.digest, third.digest) is None
    assert host.shadow.changed_since(third.digest, third.digest) is not None, (
        "the same weights under another name"
    )
    successor = RandomLearner(small, tmp_path / "other", lineage=1)
    await host.load(await successor.step())
    assert not list(host.place.glob("changed-*")), "memory for a new image"


async def test_without_engines_that_take_words_nothing_is_noted(
    learner: RandomLearner, host: ShadowHost
) -> None:
    for _ in range(2):
        await host.load(await learner.step(share=0.005))
    assert not list(host.place.glob("changed-*"))
