"""A site of its own: a leaf node with a mirror of the weights, from the files in ops/deploy/site, on real servers."""

import asyncio
import json
import os
import urllib.request
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import nats
import nats.errors
import pytest

from horizonrl.broker.api import Role, Stream
from horizonrl.broker.connect import connected
from horizonrl.broker.groups import GroupLog
from horizonrl.broker.nats.cluster import free_ports
from horizonrl.broker.nats.server import find_server
from horizonrl.broker.tickets import TicketQueue
from horizonrl.common.children import bound
from horizonrl.common.config.schema import BrokerSection
from tests.records import make_group, make_ticket
from tests.weights import RandomLearner, ShadowHost

pytestmark = pytest.mark.process

SITE = Path(__file__).parents[3] / "ops" / "deploy" / "site"
RUN = "sited"


@asynccontextmanager
async def server(
    name: str, folder: Path, ports: dict[str, int], **environment: str
) -> AsyncIterator[None]:
    """Run nats-server with a file of ops/deploy/site, on ports of its own and with its monitoring port open."""
    text = (SITE / f"{name}.conf").read_text(encoding="utf-8")
    for port, own in ports.items():
        text = text.replace(f"0.0.0.0:{port}", f"127.0.0.1:{own}")
    folder.mkdir()
    (folder / "server.conf").write_text(
        f'{text}\nhttp: "127.0.0.1:{ports["http"]}"\n', encoding="utf-8"
    )
    process = await asyncio.create_subprocess_exec(
        find_server(),
        *("-c", str(folder / "server.conf"), "-l", str(folder / "log")),
        env=os.environ | environment | {"STORE": str(folder / "store")},
        preexec_fn=bound(),
    )
    try:
        yield
    finally:
        process.kill()
        await process.wait()


def monitored(port: int, page: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/{page}", timeout=5) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


async def mirror(url: str) -> None:
    """Create the mirror on the site's server, as an operator does."""
    text = (
        (SITE / "weights-mirror.json")
        .read_text(encoding="utf-8")
        .replace("RUN_WEIGHTS", f"{RUN}_WEIGHTS")
    )
    settings = json.loads(text) | {"max_bytes": 1 << 26}
    client = await nats.connect(url)
    answer = await client.request(
        f"$JS.API.STREAM.CREATE.{RUN}_WEIGHTS", json.dumps(settings).encode(), timeout=10
    )
    assert "error" not in json.loads(answer.data), answer.data
    await client.close()


async def test_weights_come_from_the_sites_mirror_and_all_else_goes_to_the_broker(
    tmp_path: Path,
) -> None:
    names = ("4222", "7422", "http", "site", "site http")
    port = dict(zip(names, free_ports(len(names)), strict=True))
    hub = {"4222": port["4222"], "7422": port["7422"], "http": port["http"]}
    there = {"4222": port["site"], "http": port["site http"]}

    line = f"nats-leaf://127.0.0.1:{port['7422']}"
    async with (
        server("broker", tmp_path / "hub", hub),
        server("site", tmp_path / "there", there, BROKER=line),
        AsyncExitStack() as opened,
    ):
        at_hub = BrokerSection(url=f"nats://127.0.0.1:{port['4222']}")
        controller = await opened.enter_async_context(connected(RUN, at_hub, Role.CONTROLLER))
        learner = RandomLearner(controller, tmp_path / "weights")
        while monitored(port["http"], "leafz")["leafnodes"] == 0:
            await asyncio.sleep(0.05)
        await mirror(f"nats://127.0.0.1:{port['site']}")
        at_site = BrokerSection(url=f"nats://127.0.0.1:{port['site']}", nats={"domain": "hub"})  # type: ignore[arg-type]
        actors = [
            await opened.enter_async_context(connected(RUN, at_site, Role.ACTOR)) for _ in range(4)
        ]
        hosts = [ShadowHost(actor, tmp_path / f"host{n}") for n, actor in enumerate(actors)]

        # The announcement may come before the mirror has the bytes: an actor waits for them.
        for _ in range(3):
            manifest = await learner.step()
            loaded = await asyncio.gather(*(host.load(manifest) for host in hosts))
            assert set(loaded) == {learner.images[manifest.policy]}
        stored = await actors[0].extent(Stream.WEIGHTS)
        assert stored.last_sequence == (await controller.extent(Stream.WEIGHTS)).last_sequence
        # The mirror's server has answered the actors, and the broker has sent each message to the site once.
        crossed = monitored(port["http"], "leafz?")["leafs"][0]["out_bytes"]
        received = sum(host.received(form) for host in hosts for form in ("frame", "changes"))
        assert received == 4 * sum(
            host.received("frame") + host.received("changes") for host in hosts[:1]
        )
        assert crossed < received, "four actors, one crossing"

        # Tickets, groups and state are the broker's.
        await TicketQueue(controller).issue(make_ticket(1))
        lease = await TicketQueue(actors[0]).lease(10.0)
        assert lease is not None
        await GroupLog(actors[0]).publish(make_group(1))
        await lease.delivery.extend()
        await lease.delivery.acknowledge()
        assert (await controller.extent(Stream.GROUPS)).messages == 1
        assert (await controller.queue()).leased == 0

        # A new actor there begins from the mirror's key frame.
        late = ShadowHost(actors[1], tmp_path / "late")
        assert await late.load(manifest) == learner.images[manifest.policy]
