"""What a server sends per version to many followers: with key frames, with changes, and with hosts that share an image.

The followers are the actors' own (`actors/weights/host_copy.py`), without an engine, many in this process. The
bytes are counted by the server.
"""

import asyncio
import json
import resource
import statistics
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from horizonrl.actors.weights.host_copy import Shadow
from horizonrl.broker.api import Key, Role, Transport
from horizonrl.broker.connect import connected
from horizonrl.broker.nats.server import EmbeddedServer
from horizonrl.broker.state import StateStore
from horizonrl.broker.weights.frames import digest_file, publish_frame
from horizonrl.common.config.schema import BrokerSection
from horizonrl.common.metrics import Metrics
from horizonrl.common.state import WeightsManifest
from horizonrl.common.types import PolicyVersion
from horizonrl.learner.loop.fence import Fence
from horizonrl.learner.loop.weights import WeightsPublisher

VERSIONS = 3
CHANGED = 0.0375
"""Share of the words that a version changes, as at a learning rate of 4e-5; by one unit in the last place."""
WAYS = ("key frames", "changes", "changes, shared")


def run(json_file: Path | None, followers: int, per_host: int, frame_bytes: int) -> int:
    """Measure each way to distribute, each on a server of its own; return an exit code."""
    rows = [asyncio.run(_measure(way, followers, per_host, frame_bytes)) for way in WAYS]
    for row in rows:
        sent, least, most = (row[name] / 1e6 for name in ("bytes_per_version", "least", "most"))
        print(
            f"{row['way']:16} {row['followers']} followers on {row['hosts']} hosts: {sent:.2f} MB per version "
            f"({least:.2f}-{most:.2f}), {1e6 * sent / row['frame_bytes']:.2f} frames; "
            f"{row['seconds_per_version']:.2f} s"
        )
    if json_file is not None:
        json_file.write_text(json.dumps({"versions": VERSIONS, "rows": rows}, indent=2) + "\n", encoding="utf-8")
    return 0


async def _measure(way: str, followers: int, per_host: int, frame_bytes: int) -> dict[str, Any]:
    hosts = followers // per_host if way.endswith("shared") else followers
    sent: list[float] = []
    seconds: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        async with EmbeddedServer(Path(folder) / "nats") as server, AsyncExitStack() as opened:
            broker = BrokerSection(url=server.url)
            controller = await opened.enter_async_context(connected("followers", broker, Role.CONTROLLER))
            shadows = []
            for number in range(followers):
                place = Path(folder) / f"host-{number % hosts}"
                place.mkdir(exist_ok=True)
                transport = await opened.enter_async_context(connected("followers", broker, Role.ACTOR))
                shadows.append(Shadow(transport, place, Metrics()))
            publisher = WeightsPublisher(controller, Fence(controller), Path(folder) / "weights", share_files=False)
            words = np.random.default_rng(0).normal(0, 0.02, frame_bytes // 2).astype(np.float32).view(np.uint32) >> 16
            words_W, chance = words.astype(np.uint16), np.random.default_rng(1)
            for version in range(1, VERSIONS + 2):
                words_W[np.flatnonzero(chance.random(len(words_W), np.float32) < CHANGED)] += np.uint16(1)
                policy = PolicyVersion(version=version)
                manifest = await _publish(publisher, controller, policy, words_W, way == "key frames")
                before, began = await _out_bytes(server), time.monotonic()
                await asyncio.gather(*(_load(shadow, manifest) for shadow in shadows))
                seconds.append(time.monotonic() - began)
                sent.append(await _out_bytes(server) - before)
    # The first version is a key frame for everybody, whatever the way.
    return {
        "way": way,
        "followers": followers,
        "hosts": hosts,
        "frame_bytes": manifest.weights_bytes,
        "first_version_bytes": sent[0],
        "bytes_per_version": statistics.median(sent[1:]),
        "least": min(sent[1:]),
        "most": max(sent[1:]),
        "seconds_per_version": statistics.median(seconds[1:]),
        "max_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


async def _load(shadow: Shadow, manifest: WeightsManifest) -> None:
    async with shadow.holding(manifest):
        pass


async def _publish(
    publisher: WeightsPublisher, transport: Transport, policy: PolicyVersion, words_W: Any, whole: bool
) -> WeightsManifest:
    """Publish a version as the learner does, or as a whole frame; return its manifest."""
    file = publisher.path_for(policy)
    entry = {"dtype": "BF16", "shape": list(words_W.shape), "data_offsets": [0, words_W.nbytes]}
    header = json.dumps({"model.weight": entry}).encode()
    await asyncio.to_thread(file.write_bytes, len(header).to_bytes(8, "little") + header + words_W.tobytes())
    digest = await asyncio.to_thread(digest_file, file)
    if whole:
        return await publish_frame(transport, file, policy, digest)
    await publisher.publish(policy, digest)
    manifest = await StateStore(transport).get(Key.POLICY)
    assert isinstance(manifest, WeightsManifest)
    return manifest


async def _out_bytes(server: EmbeddedServer) -> float:
    """Return the bytes that the server has sent to all clients since it started."""
    async with aiohttp.ClientSession() as session, session.get(f"{server.monitoring}/varz") as answer:
        return float((await answer.json())["out_bytes"])
