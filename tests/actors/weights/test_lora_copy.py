"""With LoRA: adapters travel, and every host makes exactly the weights that were announced."""

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import pytest

from horizonrl.actors.weights.host_copy import READING
from horizonrl.actors.weights.lora_copy import FROZEN, MERGED
from horizonrl.broker.api import Key, Stream
from horizonrl.broker.memory import MemoryServer, MemoryTransport
from horizonrl.broker.state import StateStore
from horizonrl.common.errors import BrokerError, WeightsDamaged, WeightsRejected
from horizonrl.common.state import WeightsManifest
from tests.weights import AdapterLearner, RandomLearner, ShadowHost, lose_patience, shrink


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> MemoryTransport:
    shrink(monkeypatch)
    lose_patience(monkeypatch)
    return MemoryTransport(MemoryServer(), "run")


@pytest.fixture
def learner(small: MemoryTransport, tmp_path: Path) -> AdapterLearner:
    return AdapterLearner(small, tmp_path / "weights")


@pytest.fixture
def host(small: MemoryTransport, tmp_path: Path) -> ShadowHost:
    return ShadowHost(small, tmp_path / "host")


@pytest.mark.parametrize("seed", range(2))
async def test_any_subset_of_versions_and_resumes_gives_exact_weights(
    small: MemoryTransport, tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)

    learner = AdapterLearner(small, tmp_path / "weights")
    hosts = [ShadowHost(small, tmp_path / f"host{n}") for n in range(3)]
    loaded = 0
    for _ in range(40):
        if chance.random() < 0.1:  # a learner that resumed, a few versions back
            back = max(0, learner.version - chance.randrange(5))
            learner = AdapterLearner(small, tmp_path / "weights", learner.lineage + 1, back)
        manifest = await learner.step()
        for host in hosts:
            if chance.random() < 0.3:
                assert await host.load(manifest) == learner.images[manifest.policy]
                loaded += 1
    assert loaded > 10
    late = ShadowHost(small, tmp_path / "late")
    assert await late.load(manifest) == learner.images[manifest.policy]
    for host in hosts:
        assert host.received("base") <= manifest.weights_bytes, (
            "a host fetches the frozen model once"
        )
    extent = await small.extent(Stream.WEIGHTS)
    assert extent.stored_bytes < 6 * manifest.weights_bytes, "what nobody needs is purged"


async def test_the_frozen_model_is_sent_once_and_a_resumed_learner_names_it(
    small: MemoryTransport, tmp_path: Path, learner: AdapterLearner, host: ShadowHost
) -> None:
    first = await learner.step()
    await host.load(first)
    resumed = AdapterLearner(small, tmp_path / "weights", lineage=1, start=1)
    again = await resumed.publish()
    assert again.base == first.base
    assert await host.load(again) == resumed.images[again.policy]
    assert host.received("base") == first.weights_bytes
    # Another rank begins with a key frame; another model is sent.
    other = AdapterLearner(small, tmp_path / "weights", lineage=2, rank=5)
    assert (await other.step()).base == first.base
    manifest = await other.step()
    assert await host.load(manifest) == other.images[manifest.policy]
    stranger = AdapterLearner(small, tmp_path / "weights", lineage=3, seed=8)
    manifest = await stranger.step()
    assert (
        first.base is not None
        and manifest.base is not None
        and manifest.base.digest != first.base.digest
    )
    assert await host.load(manifest) == stranger.images[manifest.policy]


async def test_the_frozen_model_is_renewed_and_what_is_older_goes(
    small: MemoryTransport, learner: AdapterLearner, host: ShadowHost
) -> None:
    bases = set()
    for _ in range(150):
        manifest = await learner.step(share=0.5)
        assert manifest.base is not None
        bases.add(manifest.base.first_sequence)
        extent = await small.extent(Stream.WEIGHTS)
        assert extent.stored_bytes < 6 * manifest.weights_bytes
        assert extent.first_sequence <= manifest.base.first_sequence
    assert len(bases) > 2
    assert await host.load(manifest) == learner.images[manifest.policy]


async def test_actors_of_one_host_add_up_once_and_an_engine_keeps_its_file(
    small: MemoryTransport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = AdapterLearner(small, tmp_path / "weights")
    actors = [ShadowHost(small, tmp_path / "host") for _ in range(4)]
    manifest = await learner.step()
    images = await asyncio.gather(*(actor.load(manifest) for actor in actors))
    assert set(images) == {learner.images[manifest.policy]}
    assert sum(actor.received("base") for actor in actors) == manifest.weights_bytes
    async with actors[0].merged.holding(manifest) as file:
        newer = await learner.step()
        assert await actors[1].load(newer) == learner.images[newer.policy]
        assert file.read_bytes() == learner.images[manifest.policy]
    assert not list((tmp_path / "host").glob(f"{READING}*"))


@pytest.mark.parametrize("damage", ["adapters", "base", "announced"])
async def test_damage_is_refused_before_an_engine_sees_it(
    small: MemoryTransport, tmp_path: Path, learner: AdapterLearner, host: ShadowHost, damage: str
) -> None:
    manifest = await learner.step()
    assert manifest.adapters is not None and manifest.base is not None
    if damage == "announced":
        wrong = manifest.model_copy(update={"digest": "0" * 32})
        with pytest.raises(WeightsRejected, match="add up to other weights"):
            await host.load(wrong)
    else:
        held = small.server.runs["run"].streams[Stream.WEIGHTS].messages
        sent = manifest.base if damage == "base" else manifest.adapters
        whole = held[sent.last_sequence]
        held[sent.last_sequence] = replace(whole, data=bytes(len(whole.data)))
        with pytest.raises((WeightsRejected, BrokerError)):
            await host.load(manifest)
        held[sent.last_sequence] = whole
    assert not (tmp_path / "host" / MERGED).exists()
    assert await host.load(manifest) == learner.images[manifest.policy]


async def test_adapters_are_sent_whole_again_when_their_changes_are_damaged(
    small: MemoryTransport, learner: AdapterLearner, host: ShadowHost
) -> None:
    await host.load(await learner.step())
    harmed = (await learner.step()).adapters
    assert harmed is not None
    held = small.server.runs["run"].streams[Stream.WEIGHTS].messages
    held[harmed.last_change] = replace(held[harmed.last_change], data=b"")
    newest = await learner.step()
    with pytest.raises(WeightsDamaged):
        await host.load(newest)
    await learner.publisher.repair(newest.policy)
    repaired = await StateStore(small).get(Key.POLICY)
    assert isinstance(repaired, WeightsManifest) and repaired.adapters is not None
    assert repaired.adapters.key_frame.policy == newest.policy
    assert (repaired.base, repaired.digest) == (newest.base, newest.digest)
    assert await host.load(repaired) == learner.images[newest.policy]
    later = await learner.step()
    assert await host.load(later) == learner.images[later.policy]


@pytest.mark.parametrize("name", [FROZEN, MERGED])
async def test_files_that_rot_on_the_host_are_made_anew(
    learner: AdapterLearner, host: ShadowHost, name: str
) -> None:
    manifest = await learner.step()
    await host.load(manifest)
    content = bytearray((host.place / name).read_bytes())
    content[-1] ^= 1
    (host.place / name).write_bytes(content)
    (host.place / ".merged.safetensors.left.incoming").touch()  # by an actor that was killed
    manifest = manifest if name == MERGED else await learner.step()
    with pytest.raises(WeightsRejected, match=r"damaged|add up to other weights"):
        await host.load(manifest)
    assert await host.load(manifest) == learner.images[manifest.policy]
    assert not list(host.place.glob(".*.incoming"))


async def test_a_full_file_system_is_named(
    learner: AdapterLearner, host: ShadowHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = await learner.step()
    await host.load(manifest)
    newer = await learner.step()

    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(WeightsRejected, match="needs memory for twice the weights"):
        await host.load(newer)
    monkeypatch.undo()
    assert await host.load(newer) == learner.images[newer.policy]


async def test_a_run_that_turns_to_adapters_and_back_is_followed(
    small: MemoryTransport, tmp_path: Path
) -> None:
    host = ShadowHost(small, tmp_path / "host")
    for lineage, kind in enumerate((RandomLearner, AdapterLearner, RandomLearner)):
        learner = kind(small, tmp_path / f"weights{lineage}", lineage)
        for _ in range(3):
            manifest = await learner.step()
        assert await host.load(manifest) == learner.images[manifest.policy]


async def test_a_frozen_model_whose_fetch_was_cut_off_is_fetched_after_it_was_sent_again(
    learner: AdapterLearner, host: ShadowHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await learner.step()

    def cut_off(_: int) -> None:
        raise ConnectionError("the broker is away")

    monkeypatch.setattr(host.merged, "_count_bytes", cut_off)
    with pytest.raises(ConnectionError):
        await host.load(first)
    monkeypatch.undo()
    assert list(host.place.glob(".*.progress")), "what has been received is kept"
    while (manifest := await learner.step(share=0.5)).base == first.base:
        pass
    manifest = await learner.step()  # removes what came before the model that was sent again
    assert await host.load(manifest) == learner.images[manifest.policy]


async def test_an_image_that_a_killed_actors_engine_held_is_removed_and_a_living_ones_is_not(
    small: MemoryTransport, learner: AdapterLearner, host: ShadowHost
) -> None:
    first = await learner.step()
    async with host.merged.holding(first) as file:
        left = host.place / f"{READING}left.safetensors"
        left.write_bytes(b"an image that has been replaced since")
        await ShadowHost(small, host.place).load(await learner.step())
        assert file.read_bytes() == learner.images[first.policy]
        assert list(host.place.glob(f"{READING}*")) == [file]
    assert not list(host.place.glob(f"{READING}*"))
