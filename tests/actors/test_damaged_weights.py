"""Weights that the broker has damaged: an actor says so in its groups, and the learner publishes a key frame."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from horizonrl.actors.engines.scripted import ScriptedPolicy
from horizonrl.actors.policy import ChangedWords
from horizonrl.actors.weights.follower import WeightsFollower
from horizonrl.broker.api import Key, Role, Stream, Transport
from horizonrl.broker.connect import connected
from horizonrl.broker.memory import MemoryServer, MemoryTransport
from horizonrl.broker.nats.server import EmbeddedServer
from horizonrl.broker.state import StateStore
from horizonrl.broker.weights.chain import CHANGES
from horizonrl.broker.weights.frames import digest_file
from horizonrl.common.config.schema import BrokerSection
from horizonrl.common.state import WeightsManifest
from horizonrl.common.types import PolicyVersion
from horizonrl.learner.loop import weights_publisher as learner_weights
from horizonrl.learner.loop.weights_publisher import REPAIR_S
from tests.weights import RandomLearner

PATIENCE_S = 120.0
"""numba may have to compile first, on a busy machine."""


class RememberingPolicy(ScriptedPolicy):
    """Knows what an engine would have loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.digests: dict[PolicyVersion, str] = {}

    async def apply(
        self, weights: Path, version: PolicyVersion, words: ChangedWords | None = None
    ) -> None:
        await super().apply(weights, version)
        self.digests[version] = await asyncio.to_thread(digest_file, weights)


class Host:
    """An actor that follows the weights with an image of its own."""

    def __init__(self, transport: Transport, place: Path) -> None:
        place.mkdir()
        self.policy = RememberingPolicy()
        self.follower = WeightsFollower(transport, self.policy, place)

    @asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        async with asyncio.timeout(2 * PATIENCE_S), asyncio.TaskGroup() as group:
            task = group.create_task(self.follower.run(total_steps=100))
            yield
            task.cancel()

    async def reports(self) -> PolicyVersion:
        """Wait until a group of this actor would say that a version is damaged."""
        while self.follower.damaged is None:
            await asyncio.sleep(0.01)
        return self.follower.damaged


@pytest.fixture
def memory() -> MemoryTransport:
    return MemoryTransport(MemoryServer(), "run")


def damage(memory: MemoryTransport, sequence: int) -> None:
    held = memory.server.runs["run"].streams[Stream.WEIGHTS].messages
    assert held[sequence].subject == CHANGES
    held[sequence] = replace(held[sequence], data=bytes(len(held[sequence].data)))


async def heals(
    learner: RandomLearner,
    transport: Transport,
    folder: Path,
    harm: Callable[[WeightsManifest], Awaitable[None]],
) -> None:
    """Damage the second version's changes; an actor that has the first one and one that begins both go on."""
    early, late = (Host(transport, folder / name) for name in ("early", "late"))
    async with early.following():
        first = await learner.step()
        assert await early.follower.reached(first.policy, PATIENCE_S)
    await harm(await learner.step())
    newest = await learner.step()
    async with early.following(), late.following():
        for host in (early, late):
            assert await host.reports() == newest.policy
        await learner.publisher.repair(newest.policy)
        for host in (early, late):
            assert await host.follower.reached(newest.policy, PATIENCE_S)
            assert host.follower.damaged is None
        after = await learner.step()
        for host in (early, late):
            assert await host.follower.reached(after.policy, PATIENCE_S)
            assert host.policy.digests.items() <= learner.digests.items()
        assert after.key_policy == newest.policy
        assert after.last_change > newest.last_sequence, "changes go on across the key frame"


async def test_actors_go_on_after_a_damaged_change(memory: MemoryTransport, tmp_path: Path) -> None:
    async def harm(manifest: WeightsManifest) -> None:
        damage(memory, manifest.last_change)

    await heals(RandomLearner(memory, tmp_path / "weights"), memory, tmp_path, harm)


@pytest.mark.process
async def test_actors_go_on_after_a_byte_of_a_stored_change_has_flipped_on_disk(
    tmp_path: Path,
) -> None:
    """nats-server finds that the message does not match its checksum, and no longer has it: the chain has a hole."""

    async with (
        EmbeddedServer(tmp_path / "nats") as server,
        connected("run", BrokerSection(url=server.url), Role.CONTROLLER) as transport,
    ):

        async def harm(manifest: WeightsManifest) -> None:
            reader = await transport.reader(Stream.WEIGHTS, manifest.last_change - 1, CHANGES)
            (message,) = await reader.fetch(1, 5)
            await server.stop()  # the server has what it stored a moment ago in memory
            (block,) = (tmp_path / "nats").rglob("*_WEIGHTS/msgs/1.blk")
            stored = bytearray(block.read_bytes())
            stored[stored.index(message.data) + len(message.data) // 2] ^= 1
            block.write_bytes(stored)
            await server.start()

        learner = RandomLearner(transport, tmp_path / "weights", shapes={"model.a": (1 << 18,)})
        await heals(learner, transport, tmp_path, harm)


def test_an_actor_that_asks_for_ever_gets_few_key_frames(
    memory: MemoryTransport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1e6
    monkeypatch.setattr(learner_weights, "time", SimpleNamespace(monotonic=lambda: now))

    async def scenario() -> int:
        nonlocal now
        learner = RandomLearner(memory, tmp_path / "weights")
        key_frames = set()
        for _ in range(64):
            manifest = await learner.step(share=0.001)
            await learner.publisher.repair(manifest.policy)
            held = await StateStore(memory).get(Key.POLICY)
            assert isinstance(held, WeightsManifest)
            key_frames.add(held.key_policy)
            now += REPAIR_S / 2
        return len(key_frames)

    # The first version has one. Of those asked for, that of version 2 comes at once, then those of 4, 8, 16, 32, 64.
    assert asyncio.run(scenario()) == 7


@pytest.mark.parametrize("asked", [(1, 0), (4, 0), (2, 1)])
async def test_a_key_frame_is_not_published_for_a_version_that_needs_none(
    memory: MemoryTransport, tmp_path: Path, asked: tuple[int, int]
) -> None:
    """The key frame itself or one before it, one that is not published yet, and another lineage's."""

    learner = RandomLearner(memory, tmp_path / "weights")
    for _ in range(3):
        manifest = await learner.step()
    await learner.publisher.repair(PolicyVersion(version=asked[0], lineage=asked[1]))
    assert await StateStore(memory).get(Key.POLICY) == manifest
