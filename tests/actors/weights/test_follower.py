"""The follower: the newest weights reach the policy, the overtaken ones are skipped, bad ones are never applied."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from horizonrl.actors.engines.drained import DrainedPolicy
from horizonrl.actors.engines.scripted import ScriptedPolicy
from horizonrl.actors.policy import ChangedWords
from horizonrl.actors.weights import follower as weights_module
from horizonrl.actors.weights.follower import WeightsFollower
from horizonrl.broker.api import Key, Stream, Transport
from horizonrl.broker.memory import MemoryServer, MemoryTransport
from horizonrl.broker.state import StateStore
from horizonrl.broker.weights.frames import digest_file, publish_frame
from horizonrl.common.errors import WeightsRejected
from horizonrl.common.state import WeightsManifest
from horizonrl.common.types import PolicyVersion


class RecordingPolicy(ScriptedPolicy):
    """Remembers what was applied; `gate` holds an update back."""

    def __init__(self) -> None:
        super().__init__()
        self.applied: list[tuple[str, bytes]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.reject = False

    async def apply(
        self, weights: Path, version: PolicyVersion, words: ChangedWords | None = None
    ) -> None:
        await self.gate.wait()
        if self.reject:
            raise WeightsRejected("the probe differs")
        await super().apply(weights, version)
        self.applied.append((str(version), await asyncio.to_thread(weights.read_bytes)))


class Play:
    """A learner's side and an actor's side of one broker in memory."""

    def __init__(self, transport: Transport, folder: Path) -> None:
        self.transport = transport
        self.folder = folder
        self.policy = RecordingPolicy()
        self.scratch = folder / "scratch"
        self.follower = WeightsFollower(transport, self.policy, self.scratch, shared_dir=folder)

    async def announce(
        self,
        version: int,
        lineage: int = 0,
        *,
        spoil: bool = False,
        text: str | None = None,
        learner: str = "first",
    ) -> PolicyVersion:
        policy = PolicyVersion(version=version, lineage=lineage)
        file = self.folder / f"{policy}.frame"
        await asyncio.to_thread(file.write_bytes, (text or f"weights of {policy}").encode())
        digest = "spoilt" if spoil else await asyncio.to_thread(digest_file, file)
        manifest: WeightsManifest = await publish_frame(self.transport, file, policy, digest)
        await StateStore(self.transport).put(
            Key.POLICY, manifest.model_copy(update={"learner": learner})
        )
        return policy

    @asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        async with asyncio.timeout(10), asyncio.TaskGroup() as group:
            task = group.create_task(self.follower.run(total_steps=100))
            yield
            task.cancel()


@pytest.fixture
def play(tmp_path: Path) -> Play:
    (tmp_path / "scratch").mkdir()
    return Play(MemoryTransport(MemoryServer(), "run"), tmp_path)


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(coroutine)


async def test_an_announced_version_is_fetched_and_applied_and_its_copy_removed(play: Play) -> None:
    async with play.following():
        version = await play.announce(1)
        assert await play.follower.reached(version, 5)
    assert play.policy.applied == [("v1.l0", b"weights of v1.l0")]
    assert play.policy.version == version
    assert not list(play.scratch.glob("reading-*"))


async def test_overtaken_versions_are_skipped(play: Play) -> None:
    async with play.following():
        play.policy.gate.clear()
        for number in (1, 2, 3):
            await play.announce(number)
            await asyncio.sleep(0.01)
        play.policy.gate.set()
        assert await play.follower.reached(PolicyVersion(version=3), 5)
    assert [name for name, _ in play.policy.applied] in (["v1.l0", "v3.l0"], ["v3.l0"])


async def test_a_resumed_learners_version_is_newer_though_its_number_is_lower(play: Play) -> None:
    async with play.following():
        assert await play.follower.reached(await play.announce(5), 5)
        assert await play.follower.reached(await play.announce(3, lineage=1), 5)
        assert play.policy.version == PolicyVersion(version=3, lineage=1)
        assert await play.follower.reached(PolicyVersion(version=9, lineage=0), 0.1)


async def test_waiting_ends_when_everything_announced_is_applied(play: Play) -> None:
    assert await play.follower.reached(PolicyVersion(version=4), 0.1), "nothing was ever announced"
    async with play.following():
        await play.announce(2)
        assert await play.follower.reached(PolicyVersion(version=4), 5)
        assert play.policy.version.version == 2


async def test_waiting_ends_at_its_deadline(play: Play) -> None:
    async with play.following():
        play.policy.gate.clear()
        version = await play.announce(1)
        assert not await play.follower.reached(version, 0.05)


async def test_bytes_that_are_not_the_announced_ones_are_not_applied_and_the_next_announcement_is(
    play: Play,
) -> None:
    async with play.following():
        spoilt = await play.announce(1, spoil=True)
        assert not await play.follower.reached(spoilt, 0.1)
        assert await play.follower.reached(await play.announce(2), 5)
    assert [name for name, _ in play.policy.applied] == ["v2.l0"]


def test_a_frame_that_could_not_be_fetched_is_tried_again(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        shared = play.folder / "shared.safetensors"
        policy = PolicyVersion(version=1)
        content = b"weights"
        await asyncio.to_thread(shared.write_bytes, content)
        digest = await asyncio.to_thread(digest_file, shared)
        shared.unlink()
        manifest = WeightsManifest(
            policy=policy, weights_bytes=len(content), digest=digest, path=str(shared)
        )
        async with play.following():
            await StateStore(play.transport).put(Key.POLICY, manifest)
            assert not await play.follower.reached(policy, 0.05)
            await asyncio.to_thread(shared.write_bytes, content)
            assert await play.follower.reached(policy, 5)
        assert await asyncio.to_thread(shared.exists), "a shared file is the learner's to remove"

    monkeypatch.setattr(weights_module, "RETRY_S", 0.05)
    run(scenario())


async def test_weights_that_the_probe_rejects_end_the_follower(play: Play) -> None:
    play.policy.reject = True
    await play.announce(1)
    with pytest.raises(ExceptionGroup) as raised:
        await asyncio.wait_for(play.follower.run(total_steps=10), 5)
    assert raised.group_contains(WeightsRejected, match="probe")


async def test_a_shared_file_that_the_learner_removes_during_a_drain_is_loaded(play: Play) -> None:
    shared, policy = play.folder / "shared.safetensors", PolicyVersion(version=1)
    await asyncio.to_thread(shared.write_bytes, b"weights")
    digest = await asyncio.to_thread(digest_file, shared)
    drained = DrainedPolicy(play.policy)
    play.follower = WeightsFollower(play.transport, drained, play.scratch, shared_dir=play.folder)
    turn, ended = asyncio.Event(), asyncio.Event()

    async def generate(*_: Any, **__: Any) -> None:
        turn.set()
        await ended.wait()

    play.policy.generate = generate  # type: ignore[method-assign, assignment]
    async with play.following(), asyncio.TaskGroup() as group:
        group.create_task(
            drained.generate([1], max_tokens=1, temperature=1.0, stop_ids=(), seed=None)
        )
        await turn.wait()
        manifest = WeightsManifest(policy=policy, weights_bytes=7, digest=digest, path=str(shared))
        await StateStore(play.transport).put(Key.POLICY, manifest)
        while drained._open.is_set():
            await asyncio.sleep(0.01)
        shared.unlink()
        ended.set()
        assert await play.follower.reached(policy, 5)
    assert play.policy.applied == [("v1.l0", b"weights")]


@pytest.mark.parametrize(("version", "lineage"), [(3, 1), (5, 1), (4, 0), (7, 1)])
async def test_a_run_that_went_back_to_a_backup_is_followed_though_its_versions_have_been_applied(
    play: Play, version: int, lineage: int
) -> None:
    """Broker and run directory were restored: the lineage that the next learner draws is one that was used before.

    An actor that was cut off hears of it only when the restored run has a newer version than the actor applied.
    """

    async with play.following():
        for before in (4, 5):
            assert await play.follower.reached(await play.announce(before, lineage=1), 5)
        assert play.follower.lost_futures == 0
        assert isinstance(play.transport, MemoryTransport)
        play.transport.server.runs["run"].streams[
            Stream.WEIGHTS
        ].ids.clear()  # as those of a restored broker
        restored = await play.announce(
            version, lineage=lineage, text="another future", learner="second"
        )
        while play.policy.version != restored or play.policy.applied[-1][1] != b"another future":
            await asyncio.sleep(0.01)
        assert await play.follower.reached(restored, 5)
        assert play.follower.lost_futures == 1
        for after in (version + 1, version + 2):
            assert await play.follower.reached(
                await play.announce(after, lineage=lineage, learner="second"), 5
            )
        assert play.follower.lost_futures == 1
