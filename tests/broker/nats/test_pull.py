"""A request for a ticket on a real server: what it costs while there is none, and where its ticket goes."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from horizonrl.actors.engines.scripted import ScriptedPolicy
from horizonrl.actors.weights.follower import WeightsFollower
from horizonrl.broker.api import Role
from horizonrl.broker.connect import connected
from horizonrl.broker.nats.server import EmbeddedServer
from horizonrl.broker.tickets import TicketQueue
from horizonrl.common.config.schema import BrokerSection
from horizonrl.common.errors import LogGap
from tests.records import make_ticket

pytestmark = pytest.mark.process

IDLE_S = 4.0


async def test_an_idle_actor_sends_and_hears_nothing_between_its_requests(tmp_path: Path) -> None:
    async with EmbeddedServer(tmp_path / "nats") as server:
        broker = BrokerSection(url=server.url)
        async with (
            connected("r", broker) as controller,
            connected("r", broker, Role.ACTOR) as actor,
        ):
            follower = WeightsFollower(actor, ScriptedPolicy(), tmp_path)
            following = asyncio.create_task(follower.run(total_steps=10))
            waiting = asyncio.create_task(TicketQueue(actor).lease(60.0))
            while (await controller.queue()).idle < 1:
                await asyncio.sleep(0.05)
            before = await server.figures()
            await asyncio.sleep(IDLE_S)
            after = await server.figures()
            assert after["in_msgs"] == before["in_msgs"]
            assert after["out_msgs"] == before["out_msgs"]
            assert after["subscriptions"] - before["subscriptions"] == 0
            await TicketQueue(controller).issue(make_ticket())
            async with asyncio.timeout(5.0):
                assert await waiting is not None
            following.cancel()
            await asyncio.wait([following])


async def test_requests_end_on_whole_seconds_so_that_the_server_looks_at_them_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "horizonrl.broker.nats.transport.time", SimpleNamespace(time=lambda: 1_000.25)
    )

    async with EmbeddedServer(tmp_path / "nats") as server:
        broker = BrokerSection(url=server.url)
        async with (
            connected("r", broker) as controller,
            connected("r", broker, Role.ACTOR) as actor,
        ):
            subject = controller._next_ticket  # type: ignore[attr-defined]
            heard = await controller._connection.client.subscribe(subject)  # type: ignore[attr-defined]
            # Its answer proves that the server has taken the subscription.
            await controller.queue()
            waiting = asyncio.create_task(TicketQueue(actor).lease(60.0))
            expires_s = json.loads((await heard.next_msg(timeout=30.0)).data)["expires"] / 1e9
            waiting.cancel()
            await asyncio.wait([waiting])
            assert expires_s % 1 == pytest.approx(0.75)
            assert 30 <= expires_s <= 41


async def test_more_actors_may_wait_than_a_server_allows_by_default(tmp_path: Path) -> None:
    async with EmbeddedServer(tmp_path / "nats") as server:
        broker = BrokerSection(url=server.url)
        async with connected("r", broker) as controller:
            subject = controller._next_ticket  # type: ignore[attr-defined]
            client = controller._connection.client  # type: ignore[attr-defined]
            inbox = client.new_inbox()
            answers = await client.subscribe(inbox)
            for _ in range(600):  # nats-server's own default is 512
                await client.publish(subject, b'{"batch": 1, "expires": 30000000000}', reply=inbox)
            async with asyncio.timeout(10.0):
                while (await controller.queue()).idle < 600:
                    await asyncio.sleep(0.05)
            assert answers.pending_msgs == 0


async def test_an_actor_that_stops_waiting_gets_no_ticket_that_another_one_could_have(
    tmp_path: Path,
) -> None:
    async with EmbeddedServer(tmp_path / "nats") as server:
        broker = BrokerSection(url=server.url, ack_wait_s=30.0)
        async with (
            connected("r", broker) as controller,
            connected("r", broker, Role.ACTOR) as drained,
            connected("r", broker, Role.ACTOR) as other,
        ):
            waiting = asyncio.create_task(TicketQueue(drained).lease(60.0))
            while (await controller.queue()).idle < 1:
                await asyncio.sleep(0.05)
            waiting.cancel()
            await asyncio.wait([waiting])
            await asyncio.sleep(0.1)
            await TicketQueue(controller).issue(make_ticket())
            lease = await TicketQueue(other).lease(5.0)
            assert lease is not None
            await lease.give_back()
            again = await TicketQueue(drained).lease(5.0)  # it may ask again later
            assert again is not None
            assert again.deliveries == 2


async def test_a_restarted_server_is_asked_again_at_once(tmp_path: Path) -> None:
    async with EmbeddedServer(tmp_path / "nats") as server:
        broker = BrokerSection(url=server.url)
        async with (
            connected("r", broker) as controller,
            connected("r", broker, Role.ACTOR) as actor,
        ):
            waiting = asyncio.create_task(TicketQueue(actor).lease(60.0))
            while (await controller.queue()).idle < 1:
                await asyncio.sleep(0.05)
            await server.kill()
            await server.start()
            await TicketQueue(controller).issue(make_ticket())
            async with asyncio.timeout(10.0):
                assert await waiting is not None


async def test_a_ticket_that_the_server_has_lost_holds_nobody_up(tmp_path: Path) -> None:
    """The server does not answer an acknowledgement for a consumer that is gone, nor for what it has lost."""

    async with EmbeddedServer(tmp_path / "nats") as server:
        broker = BrokerSection(url=server.url, ack_wait_s=2.0)
        async with (
            connected("r", broker) as controller,
            connected("r", broker, Role.ACTOR) as actor,
        ):
            await TicketQueue(controller).issue(make_ticket())
            lease = await TicketQueue(actor).lease(10.0)
            assert lease is not None
            js = controller._connection.jetstream()  # type: ignore[attr-defined]
            await js.delete_consumer("r_TICKETS", "actors")
            async with asyncio.timeout(10.0):
                assert not await lease.acknowledge()
            with pytest.raises(LogGap, match="a controller makes it again when it starts"):
                await controller.queue()
