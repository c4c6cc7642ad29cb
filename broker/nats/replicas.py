"""Replicas of a run's streams in a cluster: wait until every server that should hold a copy holds all of it.

A stream whose replicas were raised takes writes at once, while the new servers still copy what it holds. Until they
have, the loss of the old server loses the stream. So the controller, which raises them, waits before it issues tickets.
"""

import asyncio

from nats.js import JetStreamContext

from horizonrl.broker.nats.access import names
from horizonrl.broker.nats.connection import Connection
from horizonrl.common.logs import get_logger

log = get_logger()

COPY_POLL_S = 0.25
TELL_EVERY_S = 10.0


async def until_replicated(connection: Connection, run: str) -> None:
    """Return once a majority of each stream's servers has all of it. Streams with one copy are warned of."""
    js = connection.client.jetstream()
    loop = asyncio.get_running_loop()
    logged_at = loop.time()
    for name in names(run):
        while behind := await _behind(connection, js, name):
            if loop.time() - logged_at > TELL_EVERY_S:
                logged_at = loop.time()
                log.warning("replicas_awaited", stream=name, behind=behind)
            await asyncio.sleep(COPY_POLL_S)


async def _behind(connection: Connection, js: JetStreamContext, name: str) -> list[str]:
    """Return the servers that a majority still waits for."""
    info = await connection.ask(lambda: js.stream_info(name), what=f"look at {name}")
    followers = info.cluster.replicas or [] if info.cluster else []
    if not followers:
        log.warning(
            "stream_unreplicated",
            stream=name,
            cure="set broker.nats.replicas = 3 to survive a lost server",
        )
        return []
    behind = [str(peer.name) for peer in followers if not peer.current or peer.offline]
    # The leader and half of its followers are a majority. To wait for all would not let a run start while one is down.
    return behind if len(behind) > len(followers) // 2 else []
