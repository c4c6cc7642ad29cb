"""The follower and changed words: an engine that takes them gets them if they lead to the version, else a file."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from horizonrl.actors.engines.scripted import ScriptedPolicy
from horizonrl.actors.policy import ChangedWords
from horizonrl.actors.weights import host_copy
from horizonrl.actors.weights.follower import WeightsFollower
from horizonrl.actors.weights.words import POSITIONS
from horizonrl.broker.memory import MemoryServer, MemoryTransport
from horizonrl.broker.weights.layout import read_layout
from horizonrl.common.types import PolicyVersion
from tests.weights import AdapterLearner, RandomLearner, rounded

SHARE = 0.01


class PatchedPolicy(ScriptedPolicy):
    """Holds an image as an engine holds its layers: it writes words into the one that it has, or takes a whole file."""

    takes_words = True

    def __init__(self) -> None:
        super().__init__()
        self.image = b""
        self.ways: list[tuple[int, str]] = []
        """Version, and how it came."""
        self.gate = asyncio.Event()
        self.gate.set()

    async def apply(
        self, weights: Path, version: PolicyVersion, words: ChangedWords | None = None
    ) -> None:
        await self.gate.wait()
        if words is None:
            self.image = await asyncio.to_thread(weights.read_bytes)
        else:
            assert words.base == self.version
            self.image = await asyncio.to_thread(self._patched, words.file)
        self.ways.append((version.version, "file" if words is None else "words"))
        await super().apply(weights, version)

    def _patched(self, words: Path) -> bytes:
        image = np.frombuffer(self.image, np.uint8).copy()
        layout, tensors = read_layout(self.image), load_file(words)
        for name, tensor in layout.tensors.items():
            if name in tensors:
                held = image[tensor.offset : tensor.offset + tensor.size_bytes].view(np.uint16)
                held[tensors[name + POSITIONS]] = tensors[name]
        return image.tobytes()


class Followed:
    """A learner, and an actor that follows it through a broker in memory or through the learner's files."""

    def __init__(self, folder: Path, share_files: bool) -> None:
        self.transport = MemoryTransport(MemoryServer(), "run")
        self.learner = RandomLearner(self.transport, folder / "weights")
        self.learner.publisher.share_files = share_files
        self.learner.words = finite(self.learner.words)
        self.policy, self.place = PatchedPolicy(), folder / "shadow"
        self.place.mkdir()
        shared_dir = folder / "weights" if share_files else None
        self.follower = WeightsFollower(
            self.transport, self.policy, self.place, shared_dir=shared_dir
        )

    @asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        async with asyncio.timeout(20), asyncio.TaskGroup() as group:
            task = group.create_task(self.follower.run(total_steps=100))
            yield
            task.cancel()

    async def step(self, share: float = SHARE) -> None:
        """Publish a version, and wait until the policy has its bits."""
        manifest = await self.learner.step(share)
        assert await self.follower.reached(manifest.policy, 5)
        assert self.policy.image == self.learner.images[manifest.policy]


def finite(words: dict[str, Any]) -> dict[str, Any]:
    """Return random words that are numbers, and stay numbers when they are changed."""
    dice = np.random.default_rng(0)
    return {
        name: rounded(dice.normal(size=array.shape).astype(np.float32))
        for name, array in words.items()
    }


@pytest.fixture(params=[False, True], ids=["broker", "shared files"])
def followed(request: pytest.FixtureRequest, tmp_path: Path) -> Followed:
    return Followed(tmp_path, request.param)


async def test_each_version_after_the_first_comes_as_words(followed: Followed) -> None:
    async with followed.following():
        for _ in range(4):
            await followed.step()
    assert followed.policy.ways == [(1, "file"), (2, "words"), (3, "words"), (4, "words")]


async def test_versions_that_were_skipped_come_as_words_in_one_go(followed: Followed) -> None:
    async with followed.following():
        await followed.step()
        followed.policy.gate.clear()
        for _ in range(3):
            manifest = await followed.learner.step(SHARE / 3)
            while followed.follower._announced != manifest:
                await asyncio.sleep(0.01)
        followed.policy.gate.set()
        assert await followed.follower.reached(manifest.policy, 5)
        assert followed.policy.image == followed.learner.images[manifest.policy]
    assert followed.policy.ways == [(1, "file"), (2, "words"), (4, "words")]


async def test_what_words_cannot_say_is_loaded_whole_and_the_next_version_is_words_again(
    followed: Followed,
) -> None:
    async with followed.following():
        await followed.step()
        followed.learner.words["model.b"][5] = 0x7FC0
        await followed.step()
        await followed.step(share=0.2)
        await followed.step()
    assert followed.policy.ways == [(1, "file"), (2, "file"), (3, "file"), (4, "words")]


async def test_without_the_words_of_a_version_its_file_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed = Followed(tmp_path, share_files=False)

    async with followed.following():
        await followed.step()
        await followed.step()
        with monkeypatch.context() as patched:
            # As on a file system that is full: the image is patched, and nothing says where.
            patched.setattr(host_copy, "write_note", lambda *args: None)
            await followed.step()
        await followed.step()
    assert followed.policy.ways == [(1, "file"), (2, "words"), (3, "file"), (4, "words")]


async def test_words_of_a_version_that_the_engine_is_not_at_are_not_used(
    followed: Followed,
) -> None:
    async with followed.following():
        await followed.step()
        # Not the one that the follower applied.
        followed.policy._version = PolicyVersion(version=0)
        await followed.step()
    assert followed.policy.ways == [(1, "file"), (2, "file")]


async def test_an_engine_that_takes_no_words_gets_files(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PatchedPolicy, "takes_words", False)

    async with followed.following():
        for _ in range(2):
            await followed.step()
        assert followed.follower._base is None, "no file is held open for nothing"
    assert followed.policy.ways == [(1, "file"), (2, "file")]


async def test_merged_images_are_loaded_whole(tmp_path: Path) -> None:
    followed = Followed(tmp_path, share_files=False)
    followed.learner = AdapterLearner(followed.transport, tmp_path / "lora")

    async with followed.following():
        for _ in range(2):
            await followed.step()
    assert followed.policy.ways == [(1, "file"), (2, "file")]
