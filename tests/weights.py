"""A learner that publishes random versions, and hosts that follow them: the two ends of the weights stream."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horizonrl.actors.weights import host_copy
from horizonrl.actors.weights.host_copy import Shadow
from horizonrl.actors.weights.lora_copy import MergedImage
from horizonrl.broker.api import Key, Transport
from horizonrl.broker.state import StateStore
from horizonrl.broker.weights import chain, frames
from horizonrl.broker.weights.frames import digest_file
from horizonrl.common.metrics import Metrics
from horizonrl.common.state import WeightsManifest
from horizonrl.common.types import PolicyVersion
from horizonrl.learner.engine.checkpoint.weights_file import ADAPTERS
from horizonrl.learner.loop import weights_publisher
from horizonrl.learner.loop.fence import Fence
from horizonrl.learner.loop.weights_publisher import WeightsPublisher

KEPT = 3
"""Images that a learner remembers."""
SHAPES: Mapping[str, tuple[int, ...]] = {"model.a": (64, 33), "model.b": (513,), "model.c": (0,)}


def shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a chunk of 600 bytes and a chain of six versions, so that a few versions fill both."""
    monkeypatch.setattr(frames, "CHUNK_BYTES", 600)
    monkeypatch.setattr(weights_publisher, "LONGEST_CHAIN", 6)


def lose_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a host wait no longer than a fifth of a second for what does not come."""
    for module in (frames, chain):
        monkeypatch.setattr(module, "FETCH_WAIT_S", 0.05)
    monkeypatch.setattr(host_copy, "STUCK_S", 0.2)


def image(words: dict[str, Any]) -> bytes:
    """Return a safetensors file of bfloat16 words, as the library writes it."""
    header: dict[str, Any] = {}
    data = b""
    for name, array in words.items():
        first = len(data)
        data += array.astype("<u2").tobytes()
        header[name] = {
            "dtype": "BF16",
            "shape": list(array.shape),
            "data_offsets": [first, len(data)],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


class RandomLearner:
    """Publishes random versions through the learner's own publisher."""

    def __init__(
        self,
        transport: Transport,
        folder: Path,
        lineage: int = 0,
        start: int = 0,
        shapes: Mapping[str, tuple[int, ...]] = SHAPES,
    ) -> None:
        self.transport, self.lineage, self.version = transport, lineage, start
        self.random = np.random.default_rng(lineage)
        self.words = {
            name: self.random.integers(0, 1 << 16, shape, np.uint16)
            for name, shape in shapes.items()
        }
        self.publisher = WeightsPublisher(transport, Fence(transport), folder, share_files=False)
        self.images: dict[PolicyVersion, bytes] = {}
        self.digests: dict[PolicyVersion, str] = {}

    async def step(self, share: float = 0.02) -> WeightsManifest:
        """Change a share of the words, publish the version, and return what the key `policy` says."""
        self.version += 1
        for array in self.words.values():
            chosen = np.flatnonzero(self.random.random(array.size, np.float32) < share)
            array.reshape(-1)[chosen] += self.random.integers(1, 4, chosen.size, np.uint16)
        return await self.publish()

    async def publish(self) -> WeightsManifest:
        policy = PolicyVersion(version=self.version, lineage=self.lineage)
        file = self.publisher.path_for(policy)
        self.images = {policy: image(self.words)} | dict(list(self.images.items())[:KEPT])
        file.write_bytes(self.images[policy])
        self.digests[policy] = digest_file(file)
        await self.publisher.publish(policy, self.digests[policy])
        manifest = await StateStore(self.transport).get(Key.POLICY)
        assert isinstance(manifest, WeightsManifest)
        return manifest


def floats(words: Any) -> Any:
    """Return words of bfloat16 as float32."""
    return (words.astype(np.uint32) << 16).view(np.float32)


def rounded(numbers: Any) -> Any:
    """Return float32 numbers as words of bfloat16, rounded to nearest even."""
    bits = numbers.view(np.uint32)
    words = ((bits.astype(np.uint64) + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(numbers), np.uint16(0x7FC0), words)


def merged_words(W: Any, A: Any, B: Any) -> Any:
    """Add an adapter as PROTOCOL.md says, with NumPy: all are words of bfloat16."""
    total, factor, column = np.zeros(W.shape, np.float32), floats(A), floats(B)
    with np.errstate(all="ignore"):
        for r in range(len(A)):
            total = total + column[:, r, None] * factor[r]
        return rounded(floats(W) + np.float32(32 / len(A)) * total)


class AdapterLearner(RandomLearner):
    """Publishes random adapters of a frozen random model, of which `model.a` has one."""

    def __init__(
        self,
        transport: Transport,
        folder: Path,
        lineage: int = 0,
        start: int = 0,
        rank: int = 3,
        seed: int = 7,
    ) -> None:
        super().__init__(transport, folder, lineage, start)
        frozen = np.random.default_rng(seed)
        self.words = {
            name: rounded(frozen.normal(size=s).astype(np.float32)) for name, s in SHAPES.items()
        }
        outputs, inputs = SHAPES["model.a"]
        sides = {"A": (rank, inputs), "B": (outputs, rank)}
        self.adapters = {f"model.a.lora_{side}": self.draw(*shape) for side, shape in sides.items()}
        self.publisher.base_file.write_bytes(image(self.words))
        self.base_digest = digest_file(self.publisher.base_file)

    def draw(self, *shape: int) -> Any:
        return rounded(self.random.normal(size=shape).astype(np.float32))

    async def step(self, share: float = 0.1) -> WeightsManifest:
        self.version += 1
        for array in self.adapters.values():
            chosen = np.flatnonzero(self.random.random(array.size) < share)
            array.reshape(-1)[chosen] ^= 1
        return await self.publish()

    async def publish(self) -> WeightsManifest:
        policy = PolicyVersion(version=self.version, lineage=self.lineage)
        file = self.publisher.path_for(policy)
        merged = merged_words(self.words["model.a"], *self.adapters.values())
        self.images = {policy: image(self.words | {"model.a": merged})} | dict(
            list(self.images.items())[:KEPT]
        )
        file.write_bytes(self.images[policy])
        file.with_suffix(ADAPTERS).write_bytes(image(self.adapters))
        await self.publisher.publish(policy, digest_file(file))
        manifest = await StateStore(self.transport).get(Key.POLICY)
        assert isinstance(manifest, WeightsManifest) and manifest.base is not None
        return manifest


class ShadowHost:
    """One host's shadow, and an actor on it."""

    def __init__(self, transport: Transport, place: Path, notes: bool = False) -> None:
        place.mkdir(exist_ok=True)
        self.place, self.metrics = place, Metrics()
        self.shadow = Shadow(transport, place, self.metrics, notes)
        self.merged = MergedImage(transport, place, self.metrics)

    async def load(self, manifest: WeightsManifest) -> bytes:
        async with (self.merged if manifest.adapters else self.shadow).holding(manifest) as file:
            return file.read_bytes()

    def received(self, form: str) -> float:
        return self.metrics.value("weights_received_bytes_total", form=form)
