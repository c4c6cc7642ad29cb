import asyncio
import uuid
from pathlib import Path

import pytest
from pydantic import SecretStr

from horizonrl.broker.api import Key, Role, Stream
from horizonrl.broker.nats.cluster import free_ports
from horizonrl.broker.nats.connect import _credentials, connect
from horizonrl.broker.nats.connection import Connection
from horizonrl.broker.nats.server import EmbeddedServer
from horizonrl.common.config.nats import NatsSection
from horizonrl.common.config.schema import BrokerSection
from horizonrl.common.errors import BrokerDenied, BrokerUnreachable, ConfigError


def test_a_url_that_does_not_answer_is_named_with_the_cure() -> None:
    url = f"nats://127.0.0.1:{free_ports(1)[0]}"
    with pytest.raises(
        BrokerUnreachable, match=r"nats://127\.0\.0\.1.* within 0\.5 s.*`horizonrl broker"
    ):
        asyncio.run(connect("r", BrokerSection(url=url), wait_s=0.5))


def test_a_credentials_file_that_is_missing_is_named(tmp_path: Path) -> None:
    nats = NatsSection(nkey_seed=tmp_path / "seed")
    with pytest.raises(ConfigError, match=r"broker\.nats\.nkey_seed is .*seed"):
        asyncio.run(connect("r", BrokerSection(url="nats://127.0.0.1:1", nats=nats)))


@pytest.mark.parametrize(
    ("text", "option"),
    [("SUABC\n", "nkeys_seed"), ("-----BEGIN NATS USER JWT-----\nabc\n", "user_credentials")],
)
def test_a_seed_and_a_creds_file_reach_the_client_as_what_they_are(
    tmp_path: Path, text: str, option: str
) -> None:
    (tmp_path / "role").write_text(text)
    made = _credentials(NatsSection(nkey_seed=tmp_path / "role"))
    assert {name for name, value in made.items() if value} == {option}


@pytest.mark.process
async def test_durability_is_promised_only_by_a_server_that_reads_the_key(tmp_path: Path) -> None:
    nats = NatsSection(durability="power")
    async with EmbeddedServer(tmp_path / "ours", "power") as ours:
        await (await connect("r", BrokerSection(url=ours.url, nats=nats))).close()
    async with EmbeddedServer(tmp_path / "theirs", name="nats-0") as theirs:
        settings = BrokerSection(url=theirs.url, nats=nats)
        with pytest.raises(
            ConfigError, match=r"nats-0 at .*`sync_interval: always`.*leave the key out"
        ):
            await connect("r", settings)
        await (await connect("r", BrokerSection(url=theirs.url))).close()
        await (await connect("r", settings, Role.ACTOR)).close()  # the controller alone is asked


@pytest.mark.process
async def test_two_runs_on_one_server_do_not_see_one_another(nats_server: EmbeddedServer) -> None:
    first, second = [
        await connect(f"t-{uuid.uuid4().hex[:8]}", BrokerSection(url=nats_server.url))
        for _ in range(2)
    ]
    await first.publish("groups.train", b"x", message_id="a")
    await first.put(Key.POLICY, b"p")
    assert not (await second.publish("groups.train", b"y", message_id="a")).duplicate
    assert await second.get(Key.POLICY) is None
    await first.close()
    await second.close()


@pytest.mark.process
async def test_a_closed_transport_says_so_at_once(nats_server: EmbeddedServer) -> None:
    transport = await connect("closed", BrokerSection(url=nats_server.url))
    reader = await transport.reader(Stream.GROUPS, 0)
    assert transport.connected
    await transport.close()
    assert not transport.connected
    async with asyncio.timeout(5.0):
        for call in (
            transport.publish("groups.train", b"x"),
            transport.get(Key.POLICY),
            reader.fetch(1, 30.0),
        ):
            with pytest.raises(BrokerUnreachable, match="closed"):
                await call
        with pytest.raises(BrokerUnreachable, match="closed"):
            await transport.lease(30.0)


@pytest.mark.process
async def test_wrong_credentials_are_denied(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path, extra="authorization { user: me, password: secret }")
    async with server:
        wrong, right = (
            NatsSection(user="me", password=SecretStr(word)) for word in ("wrong", "secret")
        )
        given = BrokerSection(url=server.url, nats=wrong)
        with pytest.raises(
            BrokerDenied,
            match=r"check broker\.nats\.nkey_seed, or broker\.nats\.user and the p",
        ):
            await connect("r", given)
        transport = await connect("r", given.model_copy(update={"nats": right}))
        assert (await transport.publish("groups.train", b"x")).sequence == 1
        await transport.close()


async def test_a_refusal_is_raised_from_every_request_that_follows() -> None:
    connection = Connection("nats://nowhere")
    connection.opened()
    await connection.on_error(Exception('nats: permissions violation for publish to "a.b"'))
    for _ in range(2):
        with pytest.raises(BrokerDenied, match=r"a\.b"):
            connection.raise_refusal()
