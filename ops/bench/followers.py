"""What a server sends per version to many followers: changes that hosts share, changes, and whole frames.

The followers are the actors' own (`actors/weights/host_copy.py`), without an engine, many in this process. The
bytes are counted by the server.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from horizonrl.actors.weights.host_copy import Shadow
from horizonrl.broker.api import Key, Role, Transport
from horizonrl.broker.connect import connected
from horizonrl.broker.nats.server import EmbeddedServer
from horizonrl.broker.state import StateStore
from horizonrl.broker.weights.changes import warm_up
from horizonrl.broker.weights.frames import digest_file, publish_frame
from horizonrl.common.config.schema import BrokerSection
from horizonrl.common.metrics import Metrics
from horizonrl.common.state import WeightsManifest
from horizonrl.common.types import PolicyVersion
from horizonrl.learner.loop.fence import Fence
from horizonrl.learner.loop.weights import WeightsPublisher
from horizonrl.ops.bench.case import Case, Request

FOLLOWERS, SMALL_FOLLOWERS = 200, 4
PER_HOST, SMALL_PER_HOST = 20, 2
FRAME_BYTES = 4 << 20
CHANGED = 0.0375
"""Share of the words that a version changes, as at a learning rate of 4e-5; by one unit in the last place."""


async def cases(request: Request) -> AsyncIterator[Case]:
    """Yield the one case."""
    followers = SMALL_FOLLOWERS if request.small else FOLLOWERS
    hosts = followers // (SMALL_PER_HOST if request.small else PER_HOST)
    send = partial(_send_second, request.scratch, count(), followers)
    sides = {
        "ours": partial(send, hosts, whole=False),
        "a copy per follower": partial(send, followers, whole=False),
        "whole frames": partial(send, followers, whole=True),
    }
    warm_up()
    yield Case(f"one version to {followers} followers on {hosts} hosts", sides, rounds=1)


async def _send_second(
    scratch: Path, numbers: Iterator[int], followers: int, hosts: int, whole: bool
) -> Mapping[str, float]:
    """Return what a version costs after the first one, which is a whole frame for everybody."""
    folder = scratch / str(next(numbers))
    async with AsyncExitStack() as opened:
        server = await opened.enter_async_context(EmbeddedServer(folder / "nats"))
        broker = BrokerSection(url=server.url)
        controller = await opened.enter_async_context(
            connected("followers", broker, Role.CONTROLLER)
        )
        copies = []
        for number in range(followers):
            directory = folder / f"host-{number % hosts}"
            directory.mkdir(parents=True, exist_ok=True)
            transport = await opened.enter_async_context(connected("followers", broker, Role.ACTOR))
            copies.append(Shadow(transport, directory, Metrics()))
        publisher = WeightsPublisher(
            controller, Fence(controller), folder / "weights", share_files=False
        )
        chance = np.random.default_rng(0)
        floats = chance.normal(0, 0.02, FRAME_BYTES // 2).astype(np.float32)
        words_W = (floats.view(np.uint32) >> 16).astype(np.uint16)
        for version in (1, 2):
            policy = PolicyVersion(version=version)
            manifest = await _publish(publisher, controller, policy, words_W, whole)
            before, began = await _out_bytes(server), time.monotonic()
            await asyncio.gather(*(_load(copy, manifest) for copy in copies))
            seconds, sent = time.monotonic() - began, await _out_bytes(server) - before
            words_W[chance.random(len(words_W), np.float32) < CHANGED] += np.uint16(1)
        return {"MB": sent / 1e6, "s": seconds}


async def _load(shadow: Shadow, manifest: WeightsManifest) -> None:
    async with shadow.holding(manifest):
        pass


async def _publish(
    publisher: WeightsPublisher,
    transport: Transport,
    policy: PolicyVersion,
    words_W: Any,
    whole: bool,
) -> WeightsManifest:
    """Publish a version as the learner does, or as a whole frame; return its manifest."""
    file = publisher.path_for(policy)
    entry = {"dtype": "BF16", "shape": list(words_W.shape), "data_offsets": [0, words_W.nbytes]}
    header = json.dumps({"model.weight": entry}).encode()
    await asyncio.to_thread(
        file.write_bytes, len(header).to_bytes(8, "little") + header + words_W.tobytes()
    )
    digest = await asyncio.to_thread(digest_file, file)
    if whole:
        return await publish_frame(transport, file, policy, digest)
    await publisher.publish(policy, digest)
    manifest = await StateStore(transport).get(Key.POLICY)
    assert isinstance(manifest, WeightsManifest)
    return manifest


async def _out_bytes(server: EmbeddedServer) -> float:
    """Return the bytes that the server has sent to all clients since it started."""
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{server.monitoring}/varz") as answer,
    ):
        return float((await answer.json())["out_bytes"])
